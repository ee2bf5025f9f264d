"""A grammar behind a model's reasoning, which is free: the grammar begins where the reasoning ends.

So the whole output has a grammar from its first token on, `reasoning, end marker, answer`, and nobody has to switch one
on in the middle. Where the prompt ends inside reasoning the model must come to its end; otherwise it may begin with the
opening marker, or answer at once. The first end marker is the end, as the parsers have it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from longturn.frontend.grammar import canonical_json, lark_text, lark_token
from longturn.frontend.parsers.tool_grammar import escaped


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """How reasoning begins and ends in an output, and where this output starts."""

    begin: str
    end: str
    begin_id: int | None = None
    """Token id where the vocabulary has the marker as a control token."""
    end_id: int | None = None
    opened: bool = False
    """The prompt ends inside reasoning; otherwise it is the model's choice to begin with it."""


def behind_reasoning(text: str, marks: ReasoningMarks, *, may_open_line: bool) -> str:
    """The grammar `text` (of `library_text`) behind reasoning: what comes before the end marker is free.

    Args:
        text: what the answer must be.
        marks: how the model writes reasoning.
        may_open_line: up to two line ends may stand between the end marker and the answer, as most models write it
            (JSON does not mind them).
    """
    first, *others = json.loads(text)["grammars"]
    end = lark_token(marks.end_id) if marks.end_id is not None else None
    begin = lark_token(marks.begin_id) if marks.begin_id is not None else lark_text(marks.begin)
    lines = r"/\n{0,2}/ " if may_open_line else ""
    rules = [f"reasoning: FREE {end}", "FREE: /(?s:.*)/"]
    if end is None:
        # Lazy: the first end marker is the end, since what follows it is the answer's.
        rules = [f"reasoning[lazy]: /(?s:.*){escaped(marks.end)}/"]
    head = f"start: reasoning {lines}@answer" if marks.opened else f"start: (begun {lines})? @answer"
    if not marks.opened:
        rules.append(f"begun: {begin} reasoning")
    return canonical_json(
        {"grammars": [{"lark_grammar": "\n".join([head, *rules])}, {**first, "name": "answer"}, *others]}
    )
