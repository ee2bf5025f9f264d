from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from longturn.cli.options import settings
from longturn.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    Range,
    SchedulerConfig,
    ServerConfig,
    check_config,
    config_from_dict,
)
from longturn.errors import ConfigError

NUMBERS = [setting for setting in settings() if setting.hint in (int, float)]


def nested(dotted: str, value: Any) -> dict[str, Any]:
    for part in reversed(dotted.split(".")):
        value = {part: value}
    return value  # type: ignore[no-any-return]


def test_the_defaults_are_allowed() -> None:
    assert check_config(EngineConfig()) == EngineConfig()


def test_every_number_has_a_range() -> None:
    assert len(NUMBERS) >= 12
    for setting in NUMBERS:
        with pytest.raises(ConfigError, match=f"'{setting.name}' must be"):
            config_from_dict(EngineConfig, nested(setting.name, -(1 << 60)))
        with pytest.raises(ConfigError, match=f"'{setting.name}' must be"):
            config_from_dict(EngineConfig, nested(setting.name, 1 << 60))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_setting_is_nan_or_infinite(value: float) -> None:
    for setting in NUMBERS:
        with pytest.raises(ConfigError, match=f"'{setting.name}' must be"):
            config_from_dict(EngineConfig, nested(setting.name, value))


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("model.max_context_tokens", 0, 1),
        ("cache.memory_bytes", 0, 1),
        ("cache.retention_half_life_s", -0.1, 0),
        ("scheduler.max_running", 0, 1),
        ("scheduler.max_running", 4097, 4096),
        ("scheduler.step_tokens", 0, 1),
        ("scheduler.decode_share", 1.0, 0.999),
        ("scheduler.decode_share", -0.001, 0.0),
        ("scheduler.target_itl_ms", -1.0, 0),
        ("scheduler.ageing_ms", -1.0, 0),
        ("scheduler.expected_output_tokens", 0, 1),
        ("scheduler.max_waiting", 0, 1),
        ("executor.threads", 0, 1),
        ("server.port", -1, 0),
        ("server.port", 65536, 65535),
        ("server.request_timeout_s", -1.0, 0.0),
        ("model.path", "", "x"),
        ("server.host", " ", "h"),
        ("server.api_keys", [""], ["k"]),
        ("cache_dir", "", "x"),
        ("seed", True, -5),
        ("scheduler.target_itl_ms", True, 3),
        ("model.served_name", 5, "5"),
        ("scheduler", 5, {}),
    ],
)
def test_the_ends_of_the_ranges(name: str, bad: object, good: object) -> None:
    with pytest.raises(ConfigError, match=f"'{name}") as caught:
        config_from_dict(EngineConfig, nested(name, bad))
    assert "\n" not in str(caught.value)
    config_from_dict(EngineConfig, nested(name, good))


@pytest.mark.parametrize(
    ("value", "message"),
    [(0, "at least 1"), (1 << 60, f"from 1 to {1 << 53}"), (1, None), (math.nan, "at least 1")],
)
def test_a_range_says_what_is_wrong(value: float, message: str | None) -> None:
    assert Range(1).complaint(value) == message


BAD_TREES: list[tuple[EngineConfig, str]] = [
    (EngineConfig(cache=CacheConfig(memory_bytes=-1)), "cache.memory_bytes"),
    (EngineConfig(scheduler=SchedulerConfig(max_running="4")), "scheduler.max_running"),  # type: ignore[arg-type]
    (EngineConfig(model=ModelConfig(weights="q9")), "model.weights"),  # type: ignore[arg-type]
    (EngineConfig(server=ServerConfig(api_keys="key")), "server.api_keys"),  # type: ignore[arg-type]
    (EngineConfig(server=None), "server"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("tree", "name"), BAD_TREES)
def test_trees_that_a_program_built_are_checked_too(tree: EngineConfig, name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' must be"):
        check_config(tree)


def test_a_checked_tree_has_the_declared_types() -> None:
    given = EngineConfig(scheduler=SchedulerConfig(ageing_ms=5), server=ServerConfig(api_keys=["a"]))  # type: ignore[arg-type]
    checked = check_config(given)
    assert type(checked.scheduler.ageing_ms) is float
    assert checked.server.api_keys == ("a",)
    part = dataclasses.replace(SchedulerConfig(), step_tokens=0)
    with pytest.raises(ConfigError, match=r"'scheduler\.step_tokens' must be"):
        check_config(part, where="scheduler.")
