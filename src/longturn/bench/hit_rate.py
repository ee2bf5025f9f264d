"""The prefix-cache hit rate that a trace allows: what an unbounded cache, shared by one session tree, would serve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """The whole blocks of one recorded prompt."""

    tree: str
    """The session tree that it belongs to. Block ids mean something only inside their tree."""
    hash_ids: Sequence[int]
    """Block ids in prompt order; an id stands for the block and all before it."""
    counted: bool = True
    """False for a prompt that fills the cache but is not measured: warm-up, or a request that failed."""


def hit_blocks(prompts: Iterable[PromptBlocks]) -> list[int]:
    """For each prompt the length, in blocks, of its longest prefix seen before in its tree.

    Args:
        prompts: in the order of their recorded starts.
    """
    seen: dict[str, set[int]] = {}
    hits = []
    for prompt in prompts:
        known = seen.setdefault(prompt.tree, set())
        hit = 0
        for block in prompt.hash_ids:
            if block not in known:
                break  # what follows a block that is not cached cannot be used, seen or not
            hit += 1
        hits.append(hit)
        known.update(prompt.hash_ids)
    return hits


def theoretical_hit_rate(prompts: Sequence[PromptBlocks]) -> float | None:
    """Hit blocks over all blocks of the counted prompts; None if they have no block.

    Partial blocks at the end of a prompt are in neither number, as the recordings leave them out.
    """
    pairs = [
        (hit, len(prompt.hash_ids)) for hit, prompt in zip(hit_blocks(prompts), prompts, strict=True) if prompt.counted
    ]
    total = sum(blocks for _, blocks in pairs)
    return sum(hit for hit, _ in pairs) / total if total else None
