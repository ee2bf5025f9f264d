"""The sizes that steps are padded to, so that a few captured graphs serve all of them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from longturn.config import PAGE_TOKENS

_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_TOKENS = (64, 128, 256, 384, 512, 576, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 6144, 8192)
"""Padding is computed like any token by the projections, so sizes lie close together."""
_BLOCKS = (128, 512, 1088, 2176, 4352)
"""16k to 557k tokens. Kernels launch programs for all blocks of a bucket, and empty ones cost time. All are multiples
of 16, the last one too, since Triton compiles anew for a stride that is not."""


class StepKind(Enum):
    DECODE = "decode"
    """One new token a row, sampled after; at most as many rows as the largest batch."""
    MANY = "many"
    """Anything else: prompts, chunks, and decodes beside them."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step is padded to."""

    kind: StepKind
    tokens: int
    """Slots of a decode, or tokens of a step of many."""
    blocks: int
    """Most pages that a row of the step may have."""


class Piece(NamedTuple):
    """A step's launches: all of a decode step; of one with many tokens, those before sampling."""

    shape: StepShape
    light: bool
    """Of a decode step: it chooses by temperature alone. One that is not light serves any rows, only slower."""


def pieces_of(shape: StepShape) -> tuple[Piece, ...]:
    """Every piece of a shape."""
    whole = Piece(shape, light=False)
    return (whole, Piece(shape, light=True)) if shape.kind is StepKind.DECODE else (whole,)


@dataclass(frozen=True, slots=True)
class Buckets:
    """Ascending sizes; the last of each is the most that there is."""

    batches: tuple[int, ...]
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]

    @staticmethod
    def of(rows: int, max_tokens: int, max_context_tokens: int, largest_batch: int = _BATCHES[-1]) -> Buckets:
        """Sizes for an executor of `rows` rows, with steps of up to `max_tokens` tokens."""
        return Buckets(
            batches=_up_to(_BATCHES, min(rows, largest_batch)),
            tokens=_up_to(_TOKENS, max_tokens),
            blocks=_up_to(_BLOCKS, -(-max_context_tokens // (16 * PAGE_TOKENS)) * 16),
        )

    def decode(self, rows: int, blocks: int) -> StepShape | None:
        """The shape of a decode step; None if it has too many rows for one."""
        if rows > self.batches[-1]:
            return None
        return StepShape(StepKind.DECODE, at_least(self.batches, rows), at_least(self.blocks, blocks))

    def many(self, tokens: int, blocks: int) -> StepShape:
        return StepShape(StepKind.MANY, at_least(self.tokens, tokens), at_least(self.blocks, blocks))


def at_least(sizes: tuple[int, ...], wanted: int) -> int:
    """The first size that is not below `wanted`. Raises ValueError if there is none."""
    at = bisect_left(sizes, wanted)
    if at == len(sizes):
        raise ValueError(f"{wanted} is over the largest size of {sizes[-1]}")
    return sizes[at]


def _up_to(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    return (*(size for size in sizes if size < most), most)
