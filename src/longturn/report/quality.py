"""The record of a quality measurement: two configurations of a model on one set of texts and prompts.

It stands in a file of its own, and its main figures can be attached to points of the candidate's configuration, where
the page shows them beside speed. Definitions of the figures are in `bench/quality.py`. Reading is strict as for points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from longturn.report.point import Model, Point, Quality
from longturn.report.schema import Environment, RecordFile, ResultError

QUALITY_KIND = "longturn-quality"
QUALITY_VERSION = 1
_ENGINE = "longturn"


class Side(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of the two configurations."""

    label: str
    """For people: `fp32 weights, fp32 cache`."""
    model: Model
    settings: dict[str, str]
    """As asked for: `model.weights` ..., less this machine's paths."""
    resolved: dict[str, str]
    """What the settings that have an `auto` and decide results came to: `model.weights`, `cache.dtype`."""
    automatic: dict[str, str]
    """What `auto` stands for in each of them, for this model."""
    device: str


class Kl(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """KL divergence of the candidate's distribution from the reference's over positions, nats."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class TextQuality(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    positions: int
    reference_perplexity: float
    candidate_perplexity: float
    perplexity_delta: float
    """Relative: +0.01 is 1 % worse."""
    perplexity_delta_error: float | None
    """Standard error of it, positions taken as independent."""
    top1_agreement: float
    kl: Kl


class PromptQuality(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Greedy answers to one prompt, in tokens."""

    name: str
    prompt_tokens: int
    reference_tokens: int
    candidate_tokens: int
    agreed_tokens: int
    """Until the first difference."""
    same: bool


class QualityResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    created: str
    """UTC, ISO 8601."""
    command: str
    """What a reader types to measure it again."""
    reference: Side
    candidate: Side
    text_set: str
    """Name of the shipped set, or the names of the files."""
    text_digest: str
    """Of texts and prompts."""
    window_tokens: int
    """Texts are cut into sequences of at most this length, each computed from its start."""
    answer_tokens: int
    """Longest answer to a prompt."""
    whole: TextQuality
    """All texts together."""
    texts: tuple[TextQuality, ...]
    prompts: tuple[PromptQuality, ...]
    partial: bool
    """Interrupted: not all positions and prompts are in it."""
    environment: Environment
    kind: str = QUALITY_KIND
    version: int = QUALITY_VERSION


def point_quality(result: QualityResult) -> Quality:
    """The figures that a point carries."""
    return Quality(
        reference=result.reference.label,
        perplexity_delta=result.whole.perplexity_delta,
        top1_agreement=result.whole.top1_agreement,
        mean_kl=result.whole.kl.mean,
        max_kl=result.whole.kl.max,
    )


def with_quality(point: Point, result: QualityResult, name: str = "point") -> Point:
    """The point with the result's figures.

    Raises:
        ResultError: the result is partial, or the point is not of the candidate's configuration; names `name` and the
            first thing that differs.
    """
    if result.partial:
        raise ResultError(f"{name}: a partial quality result is not attached")
    for what, has, wanted in _differences(point, result.candidate):
        raise ResultError(f"{name}: another configuration: {what} is {has!r}, the quality is of {wanted!r}")
    return msgspec.structs.replace(point, quality=point_quality(result))


def _differences(point: Point, side: Side) -> Iterator[tuple[str, str, str]]:
    """What of the things that decide a model's answers is not the same: (name, the point's, the side's)."""
    # Another engine's kernels round otherwise: a figure of ours says nothing about them.
    if point.engine.name.lower() != _ENGINE:
        yield "engine", point.engine.name, _ENGINE
    if point.model.name != side.model.name:
        yield "model", point.model.name, side.model.name
    if point.model.quantisation.lower() != side.model.quantisation.lower():
        yield "quantisation", point.model.quantisation, side.model.quantisation
    revisions = (point.model.revision, side.model.revision)
    if None not in revisions and revisions[0] != revisions[1]:
        yield "revision", str(revisions[0]), str(revisions[1])
    told = {"cache.dtype": point.model.kv_cache, **point.flags}
    for name, wanted in side.resolved.items():
        stated = told.get(name) or "auto"
        has = side.automatic.get(name, stated) if stated == "auto" else stated
        if has != wanted:
            yield name, has, wanted


def _problems(result: QualityResult) -> Iterator[tuple[str, str]]:
    """Figures that no measurement gives."""
    for text in (result.whole, *result.texts):
        if text.positions < 1:
            yield f"{text.name}.positions", f"must be at least 1, not {text.positions}"
        if not 0 <= text.top1_agreement <= 1:
            yield f"{text.name}.top1_agreement", f"must be between 0 and 1, not {text.top1_agreement}"
        figures = {"reference_perplexity": text.reference_perplexity, "candidate_perplexity": text.candidate_perplexity}
        figures |= {f"kl.{name}": value for name, value in msgspec.structs.asdict(text.kl).items()}
        for place, value in figures.items():
            if not (math.isfinite(value) and value >= 0):
                yield f"{text.name}.{place}", f"must be 0 or more, not {value}"
    for prompt in result.prompts:
        if not 0 <= prompt.agreed_tokens <= min(prompt.reference_tokens, prompt.candidate_tokens):
            yield f"{prompt.name}.agreed_tokens", f"is {prompt.agreed_tokens}, more than an answer has"


_FILE = RecordFile(QualityResult, QUALITY_KIND, QUALITY_VERSION, _problems)
quality_to_json, quality_from_json, save_quality, load_quality = _FILE.to_json, _FILE.from_json, _FILE.save, _FILE.load
