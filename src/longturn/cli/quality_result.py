"""From a quality measurement to its record, its table, and the points that carry its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from longturn.bench.quality import PositionScores, join_scores, quality_metrics
from longturn.bench.texts import digest
from longturn.cli.config_text import engine_settings
from longturn.cli.quality_run import Outcome, Plan
from longturn.cli.results import environment
from longturn.cli.terminal import table
from longturn.config import EngineConfig
from longturn.executor.cpu import CpuModel
from longturn.executor.native_model import NativeCpuModel
from longturn.kernels.cpu.library import unavailable_reason
from longturn.models.formats import main_format, served_formats
from longturn.models.inspect import FormatSize, inspect_model
from longturn.models.packed import is_quantised, why_not_packed
from longturn.prepared import cache_directory
from longturn.report.page import DASH, percent_text
from longturn.report.point import Model, is_point, load_point, save_point
from longturn.report.quality import Kl, PromptQuality, QualityResult, Side, TextQuality, with_quality
from longturn.report.schema import ResultError
from longturn.source import resolve_source


def make_side(config: EngineConfig, model: CpuModel) -> Side:
    """What a loaded model is.

    Raises:
        ModelError: its checkpoint cannot be described.
    """
    source = resolve_source(config.model)
    packed = isinstance(model, NativeCpuModel)
    automatic, cache = "packed" if packed else "fp32", "fp16" if packed else "fp32"
    if config.model.weights != "auto":
        can = why_not_packed(source) is None and unavailable_reason(cache_directory(config.cache_dir)) is None
        automatic = "packed" if is_quantised(source) and can else "fp32"
    stored = stored_format(inspect_model(config.model).formats)
    served = served_formats(stored, packed=packed, cache_dtype=config.cache.dtype)
    resolved = {"model.weights": served.weights, "cache.dtype": served.kv_cache}
    return Side(
        label=f"{served.weights} weights of {source.name} ({stored}), {served.kv_cache} cache",
        model=Model(name=source.name, quantisation=served.quantisation, kv_cache=served.kv_cache),
        settings=engine_settings(config),
        resolved=resolved,
        automatic={"model.weights": automatic, "cache.dtype": cache},
        device=model.description,
    )


def stored_format(formats: Sequence[FormatSize]) -> str:
    """The name that a checkpoint of several formats goes by: the shortest one that has a tenth of the parameters."""
    return main_format((size.format, size.parameters, size.bytes) for size in formats)


def make_quality(
    command: str, reference: Side, candidate: Side, text_set: str, plan: Plan, outcome: Outcome
) -> QualityResult:
    """The record of what was measured here and now.

    Raises:
        KeyboardInterrupt: it ended before the first position, so there is no record.
    """
    whole = _text("all", join_scores(outcome.texts.values()))
    if whole is None:
        raise KeyboardInterrupt
    texts = [text for name, scores in outcome.texts.items() if (text := _text(name, scores)) is not None]
    return QualityResult(
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=command,
        reference=reference,
        candidate=candidate,
        text_set=text_set,
        text_digest=digest([*plan.texts, *plan.prompts]),
        window_tokens=plan.window_tokens,
        answer_tokens=plan.answer_tokens,
        whole=whole,
        texts=tuple(texts),
        prompts=tuple(
            PromptQuality(
                name=pair.name,
                prompt_tokens=pair.prompt_tokens,
                reference_tokens=len(pair.reference),
                candidate_tokens=len(pair.candidate),
                agreed_tokens=pair.agreed_tokens,
                same=pair.same,
            )
            for pair in outcome.answers
        ),
        partial=outcome.interrupted,
        environment=environment(),
    )


def _text(name: str, scores: PositionScores) -> TextQuality | None:
    metrics = quality_metrics(scores)
    if metrics is None:
        return None
    return TextQuality(
        name=name,
        positions=metrics.positions,
        reference_perplexity=metrics.reference_perplexity,
        candidate_perplexity=metrics.candidate_perplexity,
        perplexity_delta=metrics.perplexity_delta,
        perplexity_delta_error=metrics.perplexity_delta_error,
        top1_agreement=metrics.top1_agreement,
        kl=Kl(**asdict(metrics.kl)),
    )


# --- in the terminal -------------------------------------------------------------------------------------------------


def quality_text(result: QualityResult) -> str:
    """The result as tables."""
    head = ["text", "positions", "ppl a", "ppl b", "change", "±", "top-1", "KL mean", "p50", "p90", "p99", "max"]
    lines = [f"a: {result.reference.label}", f"b: {result.candidate.label}"]
    lines += ["partial: interrupted before its end", ""] if result.partial else [""]
    lines.append(table(head, [_row(text) for text in result.texts], _row(result.whole)))
    if result.prompts:
        cells = [
            [
                prompt.name,
                str(prompt.prompt_tokens),
                str(prompt.reference_tokens),
                str(prompt.candidate_tokens),
                "all" if prompt.same else str(prompt.agreed_tokens),
            ]
            for prompt in result.prompts
        ]
        lines += ["", table(["greedy answer", "prompt", "tokens a", "tokens b", "agree"], cells)]
        lines += ["", _answers_line(result.prompts)]
    return "\n".join(lines)


def _row(text: TextQuality) -> list[str]:
    error = text.perplexity_delta_error
    return [
        text.name,
        f"{text.positions:,}",
        f"{text.reference_perplexity:.3f}",
        f"{text.candidate_perplexity:.3f}",
        f"{round(100 * text.perplexity_delta, 2) + 0.0:+.2f} %",  # + 0.0: no minus before a zero
        DASH if error is None else f"{100 * error:.2f} %",
        percent_text(text.top1_agreement),
        *(f"{value:.2g}" for value in (text.kl.mean, text.kl.p50, text.kl.p90, text.kl.p99, text.kl.max)),
    ]


def _answers_line(prompts: Sequence[PromptQuality]) -> str:
    tokens, agreed = sum(p.reference_tokens for p in prompts), sum(p.agreed_tokens for p in prompts)
    first = min((p.agreed_tokens for p in prompts if not p.same), default=None)
    tail = "" if first is None else f"; the earliest difference comes after {first}"
    return (
        f"{sum(p.same for p in prompts)} of {len(prompts)} answers are the same to the end, "
        f"{percent_text(agreed / tokens)} of a's tokens come before a difference{tail}"
    )


# --- points ----------------------------------------------------------------------------------------------------------


def attach(result: QualityResult, names: Sequence[str]) -> int:
    """Write the figures into points of the candidate's configuration; returns how many.

    All are checked before any is written: a list that is half done would be taken for done.

    Args:
        result: what was measured.
        names: point files, or folders that hold some.

    Raises:
        ResultError: a file is no point, is of another configuration, or cannot be written.
    """
    changed = [(path, with_quality(load_point(path), result, str(path))) for path in point_files(names)]
    for path, point in changed:
        save_point(point, path)
    return len(changed)


def point_files(names: Sequence[str]) -> list[Path]:
    """The named point files, and those in named folders.

    Raises:
        ResultError: a file cannot be read or is no point, or a folder holds none.
    """
    return [file for name in names for file in _point_files(Path(name))]


def _point_files(path: Path) -> list[Path]:
    if not path.is_dir():
        load_point(path)
        return [path]
    try:
        found = [file for file in sorted(path.rglob("*.json")) if is_point(file.read_bytes())]
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror or error}") from error
    if not found:
        raise ResultError(f"{path}: no point file in this folder")
    return found
