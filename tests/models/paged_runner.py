"""Drives a model over its paged cache the way an executor does: rows, shuffled pages, steps of mixed work."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from longturn.config import PAGE_TOKENS
from longturn.models.base import CausalModel, ModelStep
from longturn.ops.attention import PagedRows


class PagedRunner:
    """Each row's pages come in random order, so that a wrong page table cannot go unseen."""

    def __init__(self, model: CausalModel, *, rows: int, max_tokens: int, seed: int = 0) -> None:
        self.model = model
        per_row = -(-max_tokens // PAGE_TOKENS)
        pages = list(range(1, rows * per_row + 1))
        random.Random(seed).shuffle(pages)
        self._tables = torch.tensor(pages, dtype=torch.int32).view(rows, per_row)
        self.cache = model.kv.allocate(rows * per_row + 1)
        # Whatever pages hold from earlier requests must not matter: NaN in every dtype, and the null page too.
        self.cache.fill_(0xFF)
        self.lengths = [0] * rows

    def step(self, work: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Compute these tokens next in these rows; logits [count, vocab] of each row."""
        counts = [len(ids) for ids in work.values()]
        starts = [self.lengths[row] for row in work]
        for row, count in zip(work, counts, strict=True):
            self.lengths[row] += count
        step = ModelStep(
            token_ids=torch.tensor([token for ids in work.values() for token in ids], dtype=torch.int32),
            positions=torch.cat(
                [torch.arange(s, s + n, dtype=torch.int32) for s, n in zip(starts, counts, strict=True)]
            ),
            rows=PagedRows(
                query_starts=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
                context_tokens=torch.tensor([self.lengths[row] for row in work], dtype=torch.int32),
                page_table=self._tables[list(work)],
            ),
        )
        logits = self.model.logits(self.model.forward(step, self.cache))
        return dict(zip(work, logits.split(counts), strict=True))

    def greedy(self, row: int, prompt: Sequence[int], count: int) -> list[int]:
        """Generate `count` most likely tokens after a prompt."""
        logits = self.step({row: prompt})[row][-1]
        out = [int(logits.argmax())]
        while len(out) < count:
            out.append(int(self.step({row: out[-1:]})[row][-1].argmax()))
        return out
