"""The least time of a decode step, against the one that the kernels' benchmark counts for itself."""

from __future__ import annotations

import pytest

from longturn.cli.steps.points import PRESETS, Point, StepPreset, decode_floor_ms
from longturn.models.make_checkpoint import PRESETS as SHAPES
from longturn.models.make_checkpoint import preset_config
from longturn.models.minimax_m3_config import minimax_m3_config


@pytest.mark.parametrize(
    ("preset", "rows", "context", "floor"),
    # As in docs/performance.md.
    [
        ("mini60", 1, 131072, 1.70),
        ("mini60", 32, 8192, 10.49),
        ("slice8", 8, 32768, 6.61),
        ("slice8-nvfp4-bf16kv", 1, 4096, 1.13),
        ("slice8-nvfp4-bf16kv", 8, 32768, 2.56),
    ],
)
def test_published_floors(preset: str, rows: int, context: int, floor: float) -> None:
    form = PRESETS[preset]
    c = minimax_m3_config(preset_config(SHAPES[form.shape])["text_config"])
    assert decode_floor_ms(c, rows, context, form) == pytest.approx(floor, rel=0.01)


def test_a_cache_of_fewer_bits_takes_its_bytes_off() -> None:
    """One token and layer: an index key of 128 bytes instead of 256; each of 16 blocks 0.5625 bytes a value, not 2."""
    c = minimax_m3_config(preset_config(SHAPES["slice8"])["text_config"])
    context, values = 32768, 16 * 128 * 2 * 4 * 128
    plain, packed = (decode_floor_ms(c, 8, context, StepPreset("", "nvfp4", cache)) for cache in ("bf16", "nvfp4"))
    saved = 8 * 8 * (context * 128 * 1 + values * (2 - 0.5625))
    assert (plain - packed) * 1e-3 * 4.4e12 == pytest.approx(saved)
    assert decode_floor_ms(c, 8, context) == decode_floor_ms(c, 8, context, PRESETS["slice8"])


def test_fewer_experts_to_choose_from_are_fewer_to_read() -> None:
    """32 rows that choose among 4 experts read 4; each of 7 layers then reads 3 x 6144 x 3072 bf16 values for each."""
    c = minimax_m3_config(preset_config(SHAPES["slice8"])["text_config"])
    some, four = (decode_floor_ms(c, 32, 32768, experts=count) for count in (None, 4))
    assert decode_floor_ms(c, 32, 32768, experts=128) == some
    distinct = 128 * (1 - (124 / 128) ** 32)
    assert (some - four) * 1e-3 * 4.4e12 == pytest.approx(7 * (distinct - 4) * 3 * 6144 * 3072 * 2)


def test_a_mixed_step_has_a_row_more() -> None:
    assert (Point("decode", 4, 4096).all_rows, Point("decode", 4, 4096).cached_tokens) == (4, 16_384)
    mixed = Point("mixed", 8, 32_768, 512)
    assert (mixed.all_rows, mixed.cached_tokens) == (9, 9 * 33_280)
