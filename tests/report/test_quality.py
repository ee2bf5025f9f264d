from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from longturn.report.point import Engine, Model
from longturn.report.quality import (
    Kl,
    PromptQuality,
    QualityResult,
    Side,
    TextQuality,
    load_quality,
    quality_from_json,
    quality_to_json,
    save_quality,
    with_quality,
)
from longturn.report.schema import Environment, ResultError
from longturn.report.sweep import render_sweep
from tests.report.points import point


def side(weights: str, cache: str, quantisation: str = "q4_1") -> Side:
    return Side(
        label=f"{weights} weights",
        model=Model(name="Small", quantisation=quantisation, kv_cache=cache),
        settings={"model.weights": weights},
        resolved={"model.weights": weights, "cache.dtype": cache},
        automatic={"model.weights": "packed", "cache.dtype": "fp16" if weights == "packed" else "fp32"},
        device="cpu",
    )


def text(name: str) -> TextQuality:
    return TextQuality(
        name=name,
        positions=100,
        reference_perplexity=9.0,
        candidate_perplexity=9.09,
        perplexity_delta=0.01,
        perplexity_delta_error=0.002,
        top1_agreement=0.98,
        kl=Kl(mean=0.001, p50=0.0005, p90=0.002, p99=0.01, max=0.05),
    )


def quality(**changes: Any) -> QualityResult:
    values: dict[str, Any] = {
        "created": "2026-11-29T12:00:00Z",
        "command": "longturn bench quality",
        "reference": side("fp32", "fp32"),
        "candidate": side("packed", "fp16"),
        "text_set": "set",
        "text_digest": "0" * 16,
        "window_tokens": 1024,
        "answer_tokens": 64,
        "whole": text("all"),
        "texts": (text("one"),),
        "prompts": (
            PromptQuality(
                name="p", prompt_tokens=9, reference_tokens=64, candidate_tokens=60, agreed_tokens=12, same=False
            ),
        ),
        "partial": False,
        "environment": Environment("0.1.0", "3.11.7", None, "Linux", "A CPU", 2, None),
    }
    return QualityResult(**{**values, **changes})


def fitting(**changes: Any) -> Any:
    """A point of the candidate's configuration, as a client that knows no server flags writes it."""
    values: dict[str, Any] = {
        "engine": Engine(name="longturn", version="0.1.0"),
        "model": Model(name="Small", quantisation="Q4_1"),
        "flags": {},
        "quality": None,
    }
    return point("c", 1, 100.0, 10.0, **{**values, **changes})


def test_round_trip(tmp_path: Path) -> None:
    data = quality_to_json(quality())
    assert quality_from_json(data) == quality()
    assert quality_to_json(quality_from_json(data)) == data
    save_quality(quality(), tmp_path / "new" / "q.json")
    assert load_quality(tmp_path / "new" / "q.json") == quality()
    with pytest.raises(ResultError, match="No such file"):
        load_quality(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("kind",), "longturn-point", "not a longturn-quality file"),
        (("version",), 2, "schema version 2 is not known"),
        (("extra",), 1, "unknown field `extra`"),
        (("whole", "top1_agreement"), 1.2, "all.top1_agreement must be between 0 and 1"),
        (("whole", "positions"), 0, "all.positions must be at least 1"),
        (("whole", "kl", "max"), -0.1, "all.kl.max must be 0 or more"),
        (("texts", 0, "candidate_perplexity"), -1.0, "one.candidate_perplexity must be 0 or more"),
        (("prompts", 0, "agreed_tokens"), 61, "p.agreed_tokens is 61"),
    ],
)
def test_a_reader_refuses_what_it_does_not_know(path: tuple[Any, ...], value: Any, message: str) -> None:
    data = json.loads(quality_to_json(quality()))
    node = data
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(ResultError, match=message) as caught:
        quality_from_json(json.dumps(data).encode(), "q.json")
    assert str(caught.value).startswith("q.json: ")


def test_not_json() -> None:
    with pytest.raises(ResultError, match=r"q\.json"):
        quality_from_json(b"{", "q.json")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"flags": {"model.weights": "auto", "scheduler.max_running": "4"}},
        {"flags": {"model.weights": "packed", "cache.dtype": "fp16"}},
        {"model": Model(name="Small", quantisation="q4_1", kv_cache="fp16")},
        {"model": Model(name="Small", quantisation="q4_1", revision="abc")},  # the quality's own is not known
    ],
)
def test_points_of_the_same_configuration(changes: dict[str, Any]) -> None:
    before = fitting(**changes)
    after = with_quality(before, quality())
    assert after.quality is not None
    figures = msgspec.structs.asdict(after.quality)
    assert figures == {
        "reference": "fp32 weights", "perplexity_delta": 0.01, "top1_agreement": 0.98, "mean_kl": 0.001, "max_kl": 0.05
    }  # fmt: skip
    assert msgspec.structs.replace(after, quality=None) == before
    page = render_sweep([after], "t")
    assert "+1.00 %" in page
    assert "98.0" in page


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": Engine(name="other", version="1")}, "engine is 'other', the quality is of 'longturn'"),
        ({"model": Model(name="Large", quantisation="q4_1")}, "model is 'Large'"),
        ({"model": Model(name="Small", quantisation="unknown")}, "quantisation is 'unknown', the quality is of 'q4_1'"),
        ({"model": Model(name="Small", quantisation="q4_1", kv_cache="fp32")}, "cache.dtype is 'fp32'"),
        ({"flags": {"model.weights": "fp32"}}, "model.weights is 'fp32', the quality is of 'packed'"),
        ({"flags": {"cache.dtype": "fp32"}}, "cache.dtype is 'fp32'"),
    ],
)
def test_points_of_another_configuration(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ResultError) as caught:
        with_quality(fitting(**changes), quality(), "p.json")
    assert str(caught.value).startswith("p.json: another configuration: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_setting_that_is_not_the_default_must_be_stated() -> None:
    exact = quality(candidate=side("fp32", "fp32"))
    with pytest.raises(ResultError, match=r"model\.weights is 'packed', the quality is of 'fp32'"):
        with_quality(fitting(), exact)
    assert with_quality(fitting(flags={"model.weights": "fp32"}), exact).quality is not None


def test_another_revision_is_another_configuration() -> None:
    known = quality(candidate=msgspec.structs.replace(side("packed", "fp16"), model=revised("abc")))
    assert with_quality(fitting(model=revised("abc")), known).quality is not None
    with pytest.raises(ResultError, match="revision is 'def', the quality is of 'abc'"):
        with_quality(fitting(model=revised("def")), known)


def revised(revision: str) -> Model:
    return Model(name="Small", quantisation="q4_1", kv_cache="fp16", revision=revision)


def test_partial_results_are_not_attached() -> None:
    with pytest.raises(ResultError, match="partial"):
        with_quality(fitting(), quality(partial=True))
