"""Caches of fp8 and NVFP4 under the kernels for many tokens, in Triton's interpreter: what is written against
`ops.kv_lane`'s rules, what is computed against the torch reference over the dequantised bytes."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when triton and each kernel are imported, so it must precede both
pytest.importorskip("triton", reason="triton is not installed")
if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
    pytest.skip("the interpreter of Triton 3.6 needs numpy below 2.4", allow_module_level=True)

from longturn.kernels.msa_many import MsaManyPlan, MsaManyScratch, msa_many_tokens
from longturn.kernels.msa_plan import MsaNorms, MsaShape
from longturn.kernels.pages import KvFormat, PageLayout
from longturn.ops.kv_lane import FP8
from longturn.ops.nvfp4 import dequantize_lane, quantize_lane
from tests.kernels.many_steps import EPS, attention_over, fill_quantised, heads, many_step, stored_floats

KV, D, Q_HEADS, LAYER, BLOCKS, PAGES = 2, 32, 8, 1, 14, 40
FORMATS = [(KvFormat.FP8, KvFormat.FP8), (KvFormat.NVFP4, KvFormat.FP8), (KvFormat.PLAIN, KvFormat.FP8)]
INV_FREQ = 10000.0 ** (-torch.arange(8, dtype=torch.float32) / 8)
PLAN = MsaManyPlan(score_programs=3, score_tokens=32, piece=32, attend_tokens=8, attend_programs=3)


def rounded(values: torch.Tensor, form: KvFormat) -> torch.Tensor:
    """What a lane of this format keeps of fp32 values."""
    if form == KvFormat.NVFP4:
        return dequantize_lane(*quantize_lane(values))
    return values.clamp(-448, 448).to(FP8).float() if form == KvFormat.FP8 else values


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("spans", [[(0, 3), (126, 4), (700, 1)], [(1500, 20), (127, 2), (128, 1)]])
def test_many_tokens_over_lanes_of_fewer_bits(formats: tuple[KvFormat, KvFormat], spans: list[tuple[int, int]]) -> None:
    gen = torch.Generator().manual_seed(len(spans) + spans[0][1])
    layout = PageLayout(2, KV, D, D, kv_format=formats[0], index_format=formats[1], plain_bytes=4)
    shape = MsaShape(Q_HEADS, layout, rotary_dim=16, max_blocks=BLOCKS, top_blocks=4, eps=EPS)
    cache = torch.zeros(PAGES, layout.page_stride, dtype=torch.uint8)
    fill_quantised(cache, layout, LAYER, gen)
    order = (torch.randperm(PAGES - 1, generator=gen).int() + 1).tolist()
    table = torch.zeros(len(spans), BLOCKS, dtype=torch.int32)
    for r, (cached, new) in enumerate(spans):
        whole, last = cached // 128, (cached + new - 1) // 128
        table[r, :whole] = torch.tensor(order[:whole], dtype=torch.int32)
        table[r, whole : last + 1] = torch.tensor([order.pop() for _ in range(last + 1 - whole)], dtype=torch.int32)
    bucket = sum(new for _, new in spans) + 2
    norms = MsaNorms(*(torch.randn(D, generator=gen) * 0.2 for _ in range(4)))
    step = many_step(spans, bucket, table, INV_FREQ, D)
    projected = torch.randn(bucket, shape.projected_width, generator=gen)
    before = stored_floats(cache, layout, LAYER)
    out = torch.full((bucket, Q_HEADS * D), float("nan"))
    scratch = MsaManyScratch.allocate(bucket, PAGES, shape, PLAN, out)
    for buffer in vars(scratch).values():
        buffer.fill_(float("nan") if buffer.is_floating_point() else 77)
    msa_many_tokens(projected, step, norms, cache, LAYER, out, shape, PLAN, scratch)
    after = stored_floats(cache, layout, LAYER)
    live = step.positions >= 0
    at, rows = step.positions[live].long(), step.rows[live].long()
    pages = table[rows, at // 128].long()
    _, k, v, _, ik = projected[live].view(len(at), -1, D).split((Q_HEADS, KV, KV, KV, 1), 1)
    new = {"key": heads(k, norms.key, at, INV_FREQ), "value": v, "index": heads(ik, norms.index_key, at, INV_FREQ)}
    for name, values in new.items():
        kept = rounded(values, formats[1] if name == "index" else formats[0])
        # A value next to the middle of two codes may fall either way, after its norm was summed in another order.
        off = (after[name][pages, :, at % 128] - kept).abs() > 1e-5
        assert off.float().mean() < 2e-3
        after[name][pages, :, at % 128] = before[name][pages, :, at % 128]
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=0, equal_nan=True)
    stored = stored_floats(cache, layout, LAYER)
    dtypes = tuple(torch.float32 if form == KvFormat.PLAIN else torch.float16 for form in formats)
    lanes_of = (stored["key"], stored["value"], stored["index"])
    expected = attention_over(lanes_of, projected, step, norms, Q_HEADS, INV_FREQ, (dtypes[0], dtypes[1]), 4)
    torch.testing.assert_close(out, expected, rtol=3e-3, atol=3e-3)
    assert expected[live].norm() > 1
