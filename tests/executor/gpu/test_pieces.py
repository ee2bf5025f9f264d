"""Which pieces of steps there are, in what order they are made, and which one a step runs. No GPU is needed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from tests.executor.gpu.tiny import TINY

from longturn.executor.gpu.buckets import Piece, StepKind, StepShape, pieces_of
from longturn.executor.gpu.executor import GpuExecutor
from longturn.executor.gpu.steps import DeviceSteps, GpuLimits
from longturn.models.make_checkpoint import preset_config
from longturn.models.minimax_m3_config import MiniMaxM3Config, minimax_m3_config
from longturn.models.minimax_m3_gpu import MiniMaxM3Gpu, warm_layers
from longturn.models.minimax_m3_gpu_weights import random_gpu_weights

DECODE, MANY = StepShape(StepKind.DECODE, 4, 64), StepShape(StepKind.MANY, 64, 64)


def config(layers: int, dense_attention: int = 0) -> MiniMaxM3Config:
    return minimax_m3_config(
        preset_config(replace(TINY, layers=layers, dense_attention=dense_attention))["text_config"]
    )


def test_every_piece_is_made_once_and_a_server_waits_for_the_fewest() -> None:
    model = MiniMaxM3Gpu(random_gpu_weights(config(2), device="meta"), 40)
    steps = DeviceSteps(model, GpuLimits(16, 128, 40_000), masked=True)
    first, later = steps.first_and_later()
    assert sorted(map(repr, first + later)) == sorted(repr(p) for shape in steps.shapes() for p in pieces_of(shape))
    assert first[0].shape == steps.shapes()[0], "the others find their scratch in its memory"
    assert not any(piece.light for piece in first)
    assert {p.shape.tokens for p in first[1:]} == {1, 2, 4, 8}
    kinds = [(piece.light, piece.shape.kind is StepKind.MANY) for piece in later]
    assert kinds == sorted(kinds), "light pieces last, steps of many tokens before them"
    assert len({*steps.tails()}) == len(steps.tails()) == 2 * len(steps.sample_sizes)


@pytest.mark.parametrize(
    ("later", "light", "runs"),
    [
        ((), True, Piece(DECODE, True)),
        ((), False, Piece(DECODE, False)),
        ((Piece(DECODE, True),), True, Piece(DECODE, False)),
        ((Piece(DECODE, True),), False, Piece(DECODE, False)),
        ((Piece(DECODE, False),), True, Piece(DECODE, True)),
        ((Piece(DECODE, False), Piece(DECODE, True)), True, Piece(DECODE, True)),
    ],
)
def test_a_step_takes_the_light_piece_unless_only_the_other_is_there(
    later: tuple[Piece, ...], light: bool, runs: Piece
) -> None:
    executor = cast(Any, SimpleNamespace(_later=dict.fromkeys(later)))
    assert GpuExecutor._piece(executor, DECODE, light) == runs
    assert GpuExecutor._piece(executor, MANY, light) == Piece(MANY, False)


@pytest.mark.parametrize(("layers", "dense_attention", "warm"), [(2, 0, 2), (3, 0, 3), (8, 0, 3), (8, 2, 4), (8, 1, 3)])
def test_few_layers_end_as_all_do(layers: int, dense_attention: int, warm: int) -> None:
    """Every kind of layer before another one, and the kind of the last one before the head."""
    c = config(layers, dense_attention)
    kinds = list(zip(c.sparse_layers, c.moe_layers, strict=True))
    few = warm_layers(c)
    assert few == warm
    assert kinds[few - 1] == kinds[-1]
    if few < layers:
        assert set(kinds[: few - 1]) == set(kinds)
