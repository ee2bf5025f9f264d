"""Recorded sessions made as long as others that are only described: prompts and answers of a given median.

Blocks get longer, so who shares what with whom stays as recorded, and with it the hit rate. Pauses stay too.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from longturn.bench.traces.subagents import of_subagent
from longturn.bench.traces.tree import SessionTree, TraceRequest
from longturn.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """By how much sessions were stretched."""

    input: float = 1.0
    output: float = 1.0


def stretched(
    trees: Sequence[SessionTree], median_input: int | None, median_output: int | None
) -> tuple[list[SessionTree], Stretch]:
    """The sessions with all prompts, and all answers, longer or shorter by one factor each.

    Args:
        trees: at least one.
        median_input: tokens of the median prompt that is wanted; None leaves prompts as they are. The factor is what
            whole tokens of a block allow.
        median_output: the same of answers.

    Raises:
        ConfigError: a median is below 1, or so small that a block would hold no token.
    """
    requests = [request for tree in trees for request in tree.requests()]
    by_input = _factor("--median-input", median_input, [request.input_tokens for request in requests])
    by_output = _factor("--median-output", median_output, [request.output_tokens for request in requests])
    sizes = {tree.block_tokens for tree in trees}
    if any(round(size * by_input) < 1 for size in sizes):
        raise ConfigError(f"--median-input {median_input}: a block of {min(sizes)} tokens would hold none")
    return [stretched_by(tree, by_input, by_output, by_output) for tree in trees], Stretch(by_input, by_output)


def _factor(flag: str, wanted: int | None, found: list[int]) -> float:
    if wanted is None:
        return 1.0
    if wanted < 1:
        raise ConfigError(f"{flag} must be at least 1, not {wanted}")
    return wanted / max(1.0, statistics.median(found))


def stretched_by(tree: SessionTree, by_input: float, by_output: float, by_inner_output: float) -> SessionTree:
    """The session with prompts and answers longer by a factor each, those of subagents by one of their own."""
    old, new = tree.block_tokens, round(tree.block_tokens * by_input)

    def longer(request: TraceRequest, by: float) -> TraceRequest:
        full, rest = divmod(request.input_tokens, old)
        tail = rest * new // old
        if tree.trie.depth(request.node) > full or not full:
            tail = max(1, tail)  # a partial block with an id, or a prompt without blocks: a token must be left
        output = max(1, round(request.output_tokens * by)) if request.output_tokens else 0
        return dataclasses.replace(request, input_tokens=full * new + tail, output_tokens=output)

    conversations = tuple(
        dataclasses.replace(
            item,
            requests=tuple(
                longer(one, by_inner_output if of_subagent(tree, index) else by_output) for one in item.requests
            ),
            system_tokens=-(-item.system_tokens * new // old),
        )
        for index, item in enumerate(tree.conversations)
    )
    return dataclasses.replace(tree, block_tokens=new, conversations=conversations)
