"""Full attention over pages in Triton's interpreter, against the torch reference, in fp32."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when triton and each kernel are imported, so it must precede both
pytest.importorskip("triton", reason="triton is not installed")
if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
    pytest.skip("the interpreter of Triton 3.6 needs numpy below 2.4", allow_module_level=True)

from longturn.kernels.dense_attention import DensePlan, DenseScratch, DenseShape, dense_decode, dense_many_tokens
from longturn.kernels.msa_plan import DecodeRows
from longturn.kernels.pages import PageLayout
from longturn.ops.msa import gather_pages, sparse_attention
from tests.kernels.many_steps import EPS, heads, lanes, many_step

LAYER, BLOCKS, PAGES = 1, 5, 30


def oracle(
    projected: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, table: torch.Tensor, cache: torch.Tensor,
    shape: DenseShape, norms: tuple[torch.Tensor, torch.Tensor] | None, inv_freq: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Outputs, zeros for padding, and the cache after the step: sparse attention that chooses every block."""
    kv, d = shape.layout.kv_heads, shape.layout.head_dim
    cache, out = cache.clone(), torch.zeros(len(projected), shape.q_heads * d)

    def turned(x: torch.Tensor, number: int, at: torch.Tensor) -> torch.Tensor:
        if norms is not None:
            return heads(x, norms[number], at, inv_freq)
        unit = heads(x, torch.zeros(d), at, inv_freq)  # norm, then undo its scale
        return unit * torch.sqrt(x.square().mean(-1, keepdim=True) + EPS)

    for row in sorted(set(rows[positions >= 0].tolist())):
        mine = (rows == row) & (positions >= 0)
        at = positions[mine].long()
        q, k, v = projected[mine].view(len(at), -1, d).split((shape.q_heads, kv, kv), 1)
        key, value, _ = lanes(cache, shape.layout, LAYER)
        for lane, new in ((key, turned(k, 1, at)), (value, v)):
            lane[table[row].long()[at // 128], :, at % 128] = new
        pages = table[row, : int(at[-1]) // 128 + 1]
        every = torch.arange(len(pages)).expand(len(at), kv, -1)
        out[mine] = sparse_attention(
            turned(q, 0, at), gather_pages(key, pages), gather_pages(value, pages), at, every, d**-0.5
        ).flatten(1)
    return out, cache


def layout(kv: int, d: int) -> PageLayout:
    return PageLayout(layers=2, kv_heads=kv, head_dim=d, index_dim=d)


def table_of(spans: list[tuple[int, int]], gen: torch.Generator) -> torch.Tensor:
    """Rows whose first page is cached share it."""
    rows = len(spans)
    table = (torch.randperm(PAGES - 1, generator=gen)[: rows * BLOCKS].int() + 1).view(rows, BLOCKS)
    sharing = [r for r, (cached, _) in enumerate(spans) if cached >= 128]
    table[sharing, 0] = int(table[sharing[0], 0]) if sharing else 0
    return table


def random_inputs(
    shape: DenseShape, tokens: int, norm: bool, gen: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    d = shape.layout.head_dim
    cache = torch.randn(PAGES, shape.layout.page_stride, generator=gen)
    cache[0] = float("nan")
    norms = (torch.randn(d, generator=gen) * 0.2, torch.randn(d, generator=gen) * 0.2) if norm else None
    return torch.randn(tokens, shape.projected_width, generator=gen), cache, norms


@pytest.mark.parametrize(
    ("q_heads", "kv", "d", "rotary", "norm", "plan", "spans", "bucket"),
    [
        (4, 2, 32, 16, True, DensePlan(8, splits=1), [(200, 20), (0, 3)], 24),
        (6, 2, 16, 16, False, DensePlan(4, splits=4, keys=32), [(0, 1), (126, 3), (128, 5), (250, 9)], 20),
        (2, 1, 16, 16, True, DensePlan(64, splits=2), [(400, 66)], 67),
    ],
)
def test_dense_many(
    q_heads: int, kv: int, d: int, rotary: int, norm: bool, plan: DensePlan, spans: list[tuple[int, int]], bucket: int
) -> None:
    gen = torch.Generator().manual_seed(bucket)
    shape = DenseShape(q_heads, layout(kv, d), rotary, EPS)
    inv_freq = 10000.0 ** (-torch.arange(rotary // 2) / (rotary // 2))
    projected, cache, norms = random_inputs(shape, bucket, norm, gen)
    step = many_step(spans, bucket, table_of(spans, gen), inv_freq, d)
    # Slots that are not written yet hold NaN.
    for r, (cached, _) in enumerate(spans):
        for lane in lanes(cache, shape.layout, LAYER):
            for position in range(cached, BLOCKS * 128):
                lane[int(step.page_table[r, position // 128]), :, position % 128] = float("nan")
    expected, expected_cache = oracle(
        projected, step.positions, step.rows, step.page_table, cache.nan_to_num(), shape, norms, inv_freq
    )
    out = torch.full((bucket, q_heads * d), float("nan"))
    scratch = DenseScratch.allocate(bucket, plan.splits, shape, cache)
    for buffer in vars(scratch).values():
        buffer.fill_(float("nan"))
    dense_many_tokens(projected, step, norms, cache, LAYER, out, shape, plan, scratch)
    live = step.positions >= 0
    torch.testing.assert_close(out[live], expected[live], rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(cache.nan_to_num(), expected_cache, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("splits", "keys"), [(1, 64), (4, 128)])
def test_dense_decode(splits: int, keys: int) -> None:
    gen = torch.Generator().manual_seed(splits)
    shape = DenseShape(6, layout(2, 16), 16, EPS)
    inv_freq = 10000.0 ** (-torch.arange(8) / 8)
    at = torch.tensor([0, 127, -1, 300, 128], dtype=torch.int32)
    projected, cache, norms = random_inputs(shape, len(at), True, gen)
    rows = torch.arange(len(at), dtype=torch.int32)
    table = (torch.arange(len(at) * 5, dtype=torch.int32) + 1).view(len(at), 5)
    expected, expected_cache = oracle(projected, at, rows, table, cache, shape, norms, inv_freq)
    step = many_step([], len(at), table, inv_freq, 16)
    cos, sin = step.cos, step.sin
    angle = at[:, None].float() * inv_freq
    cos[:], sin[:] = torch.cat((angle.cos(), angle.cos()), 1), torch.cat((-angle.sin(), angle.sin()), 1)
    out = torch.full((len(at), 96), float("nan"))
    scratch = DenseScratch.allocate(len(at), splits, shape, cache)
    for buffer in vars(scratch).values():
        buffer.fill_(float("nan"))
    plan = DensePlan(1, splits, keys)
    dense_decode(projected, DecodeRows(at, table, cos, sin), norms, cache, LAYER, out, shape, plan, scratch)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(cache, expected_cache, rtol=1e-5, atol=1e-5, equal_nan=True)
