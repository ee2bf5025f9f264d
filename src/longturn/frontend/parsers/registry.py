"""Parsers by name, and which ones a model has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from longturn.errors import ConfigError
from longturn.frontend.parsers import minimax_m3_grammar, qwen3_coder_grammar
from longturn.frontend.parsers.base import ReasoningParser, ToolParser
from longturn.frontend.parsers.json_calls import hermes, llama_json, plain_json
from longturn.frontend.parsers.minimax_m3_tags import NAMESPACE
from longturn.frontend.parsers.minimax_m3_tools import MinimaxM3Tools
from longturn.frontend.parsers.qwen3_coder import BLOCK, BLOCK_END, FUNCTION, Qwen3CoderTools
from longturn.frontend.parsers.reasoning import MINIMAX_M3, THINK, MarkedReasoning, ReasoningSyntax
from longturn.frontend.parsers.tool_grammar import CallGrammar, json_call
from longturn.frontend.tool_prompt import CallSyntax

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model writes reasoning."""

    make: Callable[[str, bool], ReasoningParser]
    """From the rendered prompt, and whether tool calls are parsed too."""
    markers: tuple[str, ...]
    """Texts that the parser looks for. Where one is a control token of the vocabulary, it must reach the parser."""
    spaced: bool = False
    """Empty lines stand between reasoning and answer."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes tool calls."""

    make: Callable[[Sequence[Mapping[str, Any]]], ToolParser]
    """From the request's tools."""
    markers: tuple[str, ...]
    """As `ReasoningFormat.markers`."""
    syntax: CallSyntax | None = None
    """How tools and calls are written into prompts whose template does not do it; None if only a template can."""
    grammar: CallGrammar | None = None
    """How calls are forced; None if they cannot be."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a model writes; None where there is nothing to take apart."""

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None


def _marked(marks: ReasoningSyntax) -> ReasoningFormat:
    return ReasoningFormat(
        lambda prompt, tools: MarkedReasoning(prompt, marks, calls_end=tools), (marks.open, marks.close), marks.spaced
    )


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "minimax_m3": _marked(MINIMAX_M3),
    "think": _marked(THINK),
}
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "minimax_m3": ToolFormat(MinimaxM3Tools, (NAMESPACE,), None, minimax_m3_grammar.MINIMAX_M3),
    "hermes": ToolFormat(
        hermes,
        ("<tool_call>", "</tool_call>"),
        CallSyntax("<tool_call>\n", "\n</tool_call>"),
        CallGrammar(
            json_call("arguments"),
            "<tool_call>\n",
            "\n</tool_call>",
            "\n</tool_call>\n<tool_call>\n",
            "<tool_call>",
        ),
    ),
    "qwen3_coder": ToolFormat(Qwen3CoderTools, (BLOCK, BLOCK_END), None, qwen3_coder_grammar.QWEN3_CODER),
    # Llama's templates refuse an answer with several calls.
    "llama_json": ToolFormat(
        llama_json,
        ("<|python_tag|>",),
        CallSyntax(arguments_key="parameters"),
        CallGrammar(json_call("parameters")),
    ),
    "json": ToolFormat(
        plain_json,
        ("<tool_call>", "</tool_call>"),
        CallSyntax(),
        CallGrammar(json_call("arguments"), between="\n"),
    ),
}
_OF_ARCHITECTURE: Mapping[str, str] = {
    "MiniMaxM3SparseForConditionalGeneration": "minimax_m3",
    "MiniMaxM3SparseForCausalLM": "minimax_m3",
}
AUTO, NONE = "auto", "none"


def output_format(
    architecture: str, template: str = "", shows_tools: bool = False, *, reasoning: str = AUTO, tools: str = AUTO
) -> OutputFormat:
    """How a model's output is taken apart.

    Args:
        architecture: the checkpoint's; with `template` it decides where a name is `auto`.
        template: source of its chat template; empty if it has none.
        shows_tools: the template writes tools into the prompt.
        reasoning: a name in `REASONING_FORMATS`, `auto` or `none`.
        tools: a name in `TOOL_FORMATS`, `auto` or `none`.

    Raises:
        ConfigError: a name is unknown, or only a template that shows tools can teach a model that format.
    """
    own = _OF_ARCHITECTURE.get(architecture)
    form = OutputFormat(
        _named(reasoning if reasoning != AUTO else own or _reasoning_of(template), REASONING_FORMATS, "reasoning"),
        _named(tools if tools != AUTO else own or _tools_of(template, shows_tools), TOOL_FORMATS, "tool"),
    )
    if tools != AUTO and form.tools is not None and form.tools.syntax is None and template and not shows_tools:
        raise ConfigError(f"model.tool_parser '{tools}' needs a chat template that shows tools; this model's does not")
    return form


def _reasoning_of(template: str) -> str:
    return "think" if "</think>" in template else NONE


def _tools_of(template: str, shows_tools: bool) -> str:
    """A template shows how the model was trained to call: it writes the calls of earlier turns."""
    if not template:
        return NONE
    if shows_tools and BLOCK in template and FUNCTION in template:
        return "qwen3_coder"
    if not shows_tools or BLOCK in template:
        return "hermes"
    return "llama_json" if '"parameters": ' in template else "json"


def _named(name: str, formats: Mapping[str, T], kind: str) -> T | None:
    if name == NONE:
        return None
    if name not in formats:
        raise ConfigError(f"unknown {kind} parser '{name}' (known: {', '.join((AUTO, NONE, *sorted(formats)))})")
    return formats[name]
