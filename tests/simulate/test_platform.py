"""Platform files: what ships is complete and sourced, and what is wrong is one line that names file and key."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from longturn.errors import ConfigError
from longturn.simulate.platform import load_platform, platform_names, platform_path, read_platform

SHIPPED = ("b200", "b300", "gb200", "gb300", "h200", "vr-nvl72")


def contents(name: str = "gb300") -> dict[str, Any]:
    return tomllib.loads(platform_path(name).read_text())


def test_the_platforms_of_the_comparison_ship() -> None:
    assert platform_names() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_each_platform_reads_and_states_its_sources(name: str) -> None:
    platform = load_platform(name)
    assert all(q.source and q.date and q.unit for q in platform.spec.values())
    for family in platform.families.values():
        for constants in (*family.attention.values(), *family.experts.values()):
            assert constants.note
            if constants.basis == "tables":
                residual = constants.tables if hasattr(constants, "tables") else constants.decode
                assert residual.points > 20
                assert 0 < residual.rms < 0.2


def test_shipping_figures_of_rubin_not_launch_figures() -> None:
    platform = load_platform("vr-nvl72")
    assert platform.value("hbm_bandwidth") == pytest.approx(16128 * 4.752e9 * 2 / 8, rel=1e-3)
    assert platform.value("link_bandwidth") == 1.5e12
    assert (platform.value("sms"), platform.value("locality_sms")) == (212, 200)


def test_a_user_file_reads_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(platform_path("h200").read_text().replace("value = 4.8e12", "value = 5.0e12"))
    platform = load_platform(str(path))
    assert platform.name == "mine"
    assert platform.value("hbm_bandwidth") == 5.0e12


def test_unknown_platform_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown platform 'h300'.*gb300"):
        load_platform("h300")


def drop(data: dict[str, Any], *path: str) -> None:
    for key in path[:-1]:
        data = data[key]
    del data[path[-1]]


def put(data: dict[str, Any], value: Any, *path: str) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


FAMILY = ("calibration", "vllm-0.24")


@pytest.mark.parametrize(
    "path",
    [
        ("title",),
        ("spec", "hbm_bandwidth"),
        ("spec", "sms", "source"),
        (*FAMILY, "small_kernel_ns"),
        (*FAMILY, "attention", "fp8-fp8", "index_stream"),
        (*FAMILY, "attention", "fp8-fp8", "decode", "rms"),
        (*FAMILY, "experts", "nvfp4", "sharpness"),
        (*FAMILY, "all_reduce", "link_bytes_s"),
        (*FAMILY, "all_reduce", "ranks", "4", "ns"),
    ],
)
def test_a_missing_value_is_named_with_its_file(path: tuple[str, ...]) -> None:
    data = contents()
    drop(data, *path)
    with pytest.raises(ConfigError) as caught:
        read_platform(data, "gb300", "some.toml")
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("some.toml")
    assert path[-1] in line
    assert "missing" in line


@pytest.mark.parametrize(
    "path",
    [
        ("speed",),
        ("spec", "speed"),
        ("spec", "sms", "speed"),
        (*FAMILY, "speed"),
        (*FAMILY, "experts", "bf16", "speed"),
    ],
)
def test_an_unknown_key_is_named(path: tuple[str, ...]) -> None:
    data = contents()
    put(data, 1, *path)
    with pytest.raises(ConfigError, match=r"some\.toml.*unknown key 'speed'"):
        read_platform(data, "gb300", "some.toml")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("fast", ("spec", "hbm_bandwidth", "value")),
        (-1.0, ("spec", "hbm_bandwidth", "value")),
        ("TB/s", ("spec", "hbm_bandwidth", "unit")),
        (151.5, ("spec", "sms", "value")),
        (float("nan"), ("spec", "hbm_bytes", "value")),
        (-0.1, (*FAMILY, "attention", "fp8-fp8", "index_stream")),
        (0, (*FAMILY, "attention", "fp8-fp8", "index_stream")),
        (0.0, (*FAMILY, "experts", "nvfp4", "stream")),
        ("guessed", (*FAMILY, "attention", "fp8-fp8", "basis")),
        ([1, 2], (*FAMILY, "all_reduce", "ranks", "4", "bytes")),
        ({}, (*FAMILY, "experts")),
        ({}, ("calibration",)),
        ([1, 2], ("calibration",)),
        ("none", ("default_family",)),
    ],
)
def test_an_impossible_value_is_one_line(value: Any, path: tuple[str, ...]) -> None:
    data = contents()
    put(data, value, *path)
    with pytest.raises(ConfigError) as caught:
        read_platform(data, "gb300", "some.toml")
    assert str(caught.value).startswith("some.toml")
    assert "\n" not in str(caught.value)


def test_an_unknown_kernel_family_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"gb300: no calibration of kernel family 'x'.*vllm-0.24"):
        load_platform("gb300").family("x")
