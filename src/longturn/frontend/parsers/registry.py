"""Parsers by name, and which ones a model has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from longturn.errors import ConfigError
from longturn.frontend.parsers import minimax_m3_reasoning
from longturn.frontend.parsers.base import ReasoningParser, ToolParser
from longturn.frontend.parsers.minimax_m3_reasoning import MinimaxM3Reasoning
from longturn.frontend.parsers.minimax_m3_tags import NAMESPACE
from longturn.frontend.parsers.minimax_m3_tools import MinimaxM3Tools

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model writes reasoning."""

    make: Callable[[str, bool], ReasoningParser]
    """From the rendered prompt, and whether tool calls are parsed too."""
    markers: tuple[str, ...]
    """Texts that the parser looks for. Where one is a control token of the vocabulary, it must reach the parser."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes tool calls."""

    make: Callable[[Sequence[Mapping[str, Any]]], ToolParser]
    """From the request's tools."""
    markers: tuple[str, ...]
    """As `ReasoningFormat.markers`."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a model writes; None where there is nothing to take apart."""

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "minimax_m3": ReasoningFormat(
        lambda prompt, tools: MinimaxM3Reasoning(prompt, calls_end=tools),
        (minimax_m3_reasoning.OPEN, minimax_m3_reasoning.CLOSE),
    )
}
TOOL_FORMATS: Mapping[str, ToolFormat] = {"minimax_m3": ToolFormat(MinimaxM3Tools, (NAMESPACE,))}
_OF_ARCHITECTURE: Mapping[str, str] = {
    "MiniMaxM3SparseForConditionalGeneration": "minimax_m3",
    "MiniMaxM3SparseForCausalLM": "minimax_m3",
}
AUTO, NONE = "auto", "none"


def output_format(architecture: str, *, reasoning: str = AUTO, tools: str = AUTO) -> OutputFormat:
    """How a model's output is taken apart.

    Args:
        architecture: the checkpoint's, which decides where a name is `auto`; a dense model has no parsers.
        reasoning: a name in `REASONING_FORMATS`, `auto` or `none`.
        tools: a name in `TOOL_FORMATS`, `auto` or `none`.

    Raises:
        ConfigError: a name is unknown.
    """
    own = _OF_ARCHITECTURE.get(architecture, NONE)
    return OutputFormat(
        _named(reasoning if reasoning != AUTO else own, REASONING_FORMATS, "reasoning"),
        _named(tools if tools != AUTO else own, TOOL_FORMATS, "tool"),
    )


def _named(name: str, formats: Mapping[str, T], kind: str) -> T | None:
    if name == NONE:
        return None
    if name not in formats:
        raise ConfigError(f"unknown {kind} parser '{name}' (known: {', '.join((AUTO, NONE, *sorted(formats)))})")
    return formats[name]
