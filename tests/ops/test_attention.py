"""Paged attention against a plain dense softmax, and the reference in the package against both."""

from __future__ import annotations

import random

import pytest
import torch

from longturn.ops.attention import PagedRows, paged_attention, paged_attention_reference, plan_attention, write_kv


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One sequence in float64: query [n, heads, d] at its end, key and value [context, kv_heads, d]."""
    n, heads, d = query.shape
    context, kv_heads, _ = key.shape
    key = key.double().repeat_interleave(heads // kv_heads, dim=1)
    value = value.double().repeat_interleave(heads // kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) / d**0.5
    late = torch.arange(context)[None, :] > torch.arange(context - n, context)[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(late, -torch.inf).softmax(-1), value)


class Case:
    """Random rows over shuffled pages; earlier keys are already in the cache, this step's are written by the test."""

    def __init__(self, shape: tuple[int, int, int], rows: list[tuple[int, int]], dtype: torch.dtype, seed: int) -> None:
        heads, kv_heads, d = shape
        generator = torch.Generator().manual_seed(seed)
        used = [-(-context // 128) for context, _ in rows]
        ids = list(range(1, sum(used) + 1))
        random.Random(seed).shuffle(ids)
        table = torch.zeros(len(rows), max(used), dtype=torch.int32)
        self.key_pages = torch.full((len(ids) + 1, kv_heads, 128, d), float("nan"), dtype=dtype)
        self.value_pages = self.key_pages.clone()
        self.keys = [torch.randn(context, kv_heads, d, generator=generator).to(dtype) for context, _ in rows]
        self.values = [torch.randn(context, kv_heads, d, generator=generator).to(dtype) for context, _ in rows]
        queries, positions = [], []
        for row, (context, count) in enumerate(rows):
            for page in range(used[row]):
                table[row, page] = ids.pop()
            for position in range(context - count):
                page, slot = int(table[row, position // 128]), position % 128
                self.key_pages[page, :, slot] = self.keys[row][position]
                self.value_pages[page, :, slot] = self.values[row][position]
            queries.append(torch.randn(count, heads, d, generator=generator))
            positions.append(torch.arange(context - count, context, dtype=torch.int32))
        counts = torch.tensor([0] + [count for _, count in rows])
        contexts = torch.tensor([context for context, _ in rows], dtype=torch.int32)
        self.rows = PagedRows(counts.cumsum(0).to(torch.int32), contexts, table)
        self.queries, self.positions = queries, torch.cat(positions)
        self.new_keys = torch.cat([k[c - n :] for k, (c, n) in zip(self.keys, rows, strict=True)])
        self.new_values = torch.cat([v[c - n :] for v, (c, n) in zip(self.values, rows, strict=True)])

    def run(self) -> torch.Tensor:
        plan = plan_attention(self.rows, self.positions)
        write_kv(plan, self.new_keys, self.new_values, self.key_pages, self.value_pages)
        return paged_attention(plan, torch.cat(self.queries), self.key_pages, self.value_pages)

    def oracle(self) -> torch.Tensor:
        return torch.cat([dense(q, k, v) for q, k, v in zip(self.queries, self.keys, self.values, strict=True)])


@pytest.mark.parametrize("shape", [(6, 2, 16), (4, 4, 8), (8, 1, 32)])
@pytest.mark.parametrize("context", [1, 2, 127, 128, 129, 256, 300])
def test_one_row_equals_dense(shape: tuple[int, int, int], context: int) -> None:
    for count in {1, min(2, context), max(1, context - 128), context}:
        case = Case(shape, [(context, count)], torch.float32, seed=context)
        torch.testing.assert_close(case.run().double(), case.oracle(), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-6), (torch.float16, 2e-6), (torch.bfloat16, 2e-6)])
def test_mixed_rows_equal_dense(dtype: torch.dtype, atol: float) -> None:
    """Cached keys of a short dtype are read exactly: the oracle has the same rounded keys."""
    rng = random.Random(5)
    for seed in range(12):
        rows = []
        for _ in range(rng.randint(1, 6)):
            context = rng.randint(1, 400)
            rows.append((context, rng.choice((1, 1, rng.randint(1, context), context))))
        case = Case((6, 3, 16), rows, dtype, seed)
        torch.testing.assert_close(case.run().double(), case.oracle(), rtol=0, atol=atol)


def test_reference_equals_dense() -> None:
    case = Case((4, 2, 8), [(131, 3), (1, 1), (128, 2)], torch.float32, seed=1)
    case.run()  # writes the step's keys
    got = paged_attention_reference(case.rows, torch.cat(case.queries), case.key_pages, case.value_pages)
    torch.testing.assert_close(got.double(), case.oracle(), rtol=0, atol=1e-6)


def test_only_the_steps_slots_are_written() -> None:
    case = Case((2, 1, 4), [(130, 4), (5, 1)], torch.float32, seed=2)
    before = case.key_pages.clone()
    case.run()
    changed = ~((case.key_pages == before) | (case.key_pages.isnan() & before.isnan())).all(-1).squeeze(1)
    table = case.rows.page_table
    want = {(int(table[0, p // 128]), p % 128) for p in range(126, 130)} | {(int(table[1, 0]), 4)}
    assert {(int(page), int(slot)) for page, slot in changed.nonzero()} == want
