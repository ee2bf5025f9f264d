"""Bytes on a chip by hand, and what does not fit."""

from __future__ import annotations

import dataclasses
import re

import pytest

from longturn.errors import ConfigError
from longturn.simulate.cost.memory import chip_memory, page_bytes, transfer_ns, weight_bytes
from longturn.simulate.drafts import load_drafter
from longturn.simulate.formats import formats_named
from longturn.simulate.layout import parse_layout
from longturn.simulate.platform import load_platform
from longturn.simulate.shapes import load_shape


def test_m3_has_as_many_parameters_as_published() -> None:
    """427.04 billion, of which the vision tower (not modelled) is about 1 billion; in BF16, 2 bytes each."""
    shape = load_shape("m3")
    weights = weight_bytes(shape, parse_layout("tp1"), formats_named("bf16"))
    assert weights / 2 == pytest.approx(427.04e9, rel=0.005)


@pytest.mark.parametrize(
    ("model", "layout", "formats", "bytes_a_token"),
    [
        ("m3", "tp1", "mxfp8", 61_440 + 57 * 256),
        ("m3.1-flash", "tp1", "nvfp4", 61_440 + 60 * 128),
        ("m3.1-flash", "tp1", "nvfp4-kv4", 34_560 + 60 * 128),
        ("m3.1-flash", "tp4", "nvfp4", 61_440 // 4 + 60 * 128),
        ("m3.1-flash", "tp8", "nvfp4", 61_440 // 4 + 60 * 128),
        ("m3.1-flash", "dep4", "nvfp4", 61_440 + 60 * 128),
        ("m3", "tp1", "bf16", 122_880 + 57 * 256),
    ],
)
def test_bytes_of_a_page(model: str, layout: str, formats: str, bytes_a_token: int) -> None:
    """Published: 61,440 bytes a token in FP8 and 34,560 in NVFP4, without the index key of every sparse layer, which
    tensor parallelism does not divide."""
    assert page_bytes(load_shape(model), parse_layout(layout), formats_named(formats)) == 128 * bytes_a_token


def test_a_windowed_drafter_needs_no_pages_and_another_does() -> None:
    arguments = load_shape("m3"), parse_layout("tp1"), formats_named("nvfp4")
    bare = page_bytes(*arguments)
    assert page_bytes(*arguments, load_drafter("dspark-m3", 7)) == bare
    assert page_bytes(*arguments, load_drafter("eagle3-gqa-m3", 3)) == bare + 128 * 2 * 4 * 128


def test_capacity_of_gb300_is_what_the_reference_estimates() -> None:
    """About 10 million tokens for M3 on four GB300 with an FP8 cache."""
    memory = chip_memory(load_platform("gb300"), load_shape("m3"), parse_layout("tp4"), formats_named("nvfp4"))
    assert memory.pages * 128 == pytest.approx(9e6, rel=0.15)


def test_what_does_not_fit_says_by_how_much() -> None:
    with pytest.raises(ConfigError) as caught:
        chip_memory(load_platform("h200"), load_shape("m3"), parse_layout("tp4"), formats_named("bf16"))
    line = str(caught.value)
    assert "\n" not in line
    short = re.search(r"m3 in layout tp4 does not fit on h200.*short by ([\d.]+) GiB", line)
    assert short is not None
    # 427 GB x 2 / 4 chips, against 0.9 x 139 GiB - 4 GiB.
    assert float(short[1]) == pytest.approx(213.5e9 / 2**30 - (0.9 * 139 - 4), abs=6)


def test_moving_pages() -> None:
    platform = load_platform("h200")
    assert transfer_ns(platform, 1 << 20, 0) == 0
    assert transfer_ns(platform, 1 << 20, 64) == pytest.approx(10_000 + 64 * (1 << 20) / (64e9 * 0.85) * 1e9, abs=1)
    assert transfer_ns(platform.scaled(host_link_bandwidth=2.0), 1 << 20, 64) < transfer_ns(platform, 1 << 20, 64)


def test_a_dense_model_by_hand() -> None:
    shape, layout = load_shape("llama-3.1-8b"), parse_layout("tp1")
    assert weight_bytes(shape, layout, formats_named("bf16")) / 2 == pytest.approx(8.03e9, rel=0.002), "its parameters"
    assert page_bytes(shape, layout, formats_named("bf16")) == 128 * 32 * 2 * 8 * 128 * 2
    tied = dataclasses.replace(shape, tied=True)
    less = weight_bytes(shape, layout, formats_named("bf16")) - weight_bytes(tied, layout, formats_named("bf16"))
    assert less == 128256 * 4096 * 2
