"""What a step looks like to the cost model: a few sums over its rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepShape:
    """One step of one replica (of one attention data-parallel rank, where there are several).

    A decode row computes its last token, or that and the drafts it verifies; a chunk is a piece of a prompt, be it cold
    or the new part of a warm turn.
    """

    rows: int = 0
    """Decode rows."""
    row_tokens: int = 0
    """Tokens that they compute together: as many as rows without speculation."""
    context_tokens: int = 0
    """Sum over decode rows of positions attended to, those of this step included."""
    attended_tokens: int = 0
    """Sum over tokens of decode rows of what one sparse layer attends to: min(context, limit)."""
    chunks: tuple[tuple[int, int], ...] = ()
    """(positions before it, tokens) of each chunk."""
    samples: int = 0
    """Positions whose logits are computed."""

    @property
    def chunk_tokens(self) -> int:
        return sum([count for _, count in self.chunks]) if self.chunks else 0

    @property
    def tokens(self) -> int:
        """All tokens computed: one set of matrix products, whatever they are."""
        return self.row_tokens + self.chunk_tokens


def step_shape(
    contexts: Sequence[int],
    chunks: Iterable[tuple[int, int]] = (),
    *,
    attend_limit: int,
    tokens_per_row: int = 1,
    chunk_samples: int = 0,
) -> StepShape:
    """The shape of a step.

    Args:
        contexts: of each decode row, positions attended to by its last token (itself included).
        chunks: (positions before it, tokens) of each chunk.
        attend_limit: `ModelShape.attend_limit`.
        tokens_per_row: 1, or 1 + drafts to verify.
        chunk_samples: chunks that end their prompt.
    """
    rows = len(contexts)
    return StepShape(
        rows=rows,
        row_tokens=rows * tokens_per_row,
        context_tokens=sum(contexts),
        attended_tokens=tokens_per_row * sum(min(context, attend_limit) for context in contexts),
        chunks=tuple(chunks),
        samples=rows * tokens_per_row + chunk_samples,
    )
