"""Triton decode kernels in Triton's interpreter on the CPU, against torch references. fp32 data: the interpreter does
bf16 arithmetic on the raw bits."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when triton and each kernel are imported, so it must precede both
pytest.importorskip("triton", reason="triton is not installed")
if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
    pytest.skip("the interpreter of Triton 3.6 needs numpy below 2.4", allow_module_level=True)

from longturn.kernels.msa_decode import msa_decode
from longturn.kernels.msa_plan import DecodeRows, MsaNorms, MsaPlan, MsaScratch, MsaShape
from longturn.kernels.pages import PageLayout
from longturn.ops.gemma_norm import gemma_rms_norm
from longturn.ops.msa import gather_pages, index_block_scores, select_blocks, sparse_attention

EPS = 1e-6
HALF = 8
INV_FREQ = 10000.0 ** (-torch.arange(HALF, dtype=torch.float32) / HALF)
LAYOUT = PageLayout(layers=2, kv_heads=2, head_dim=32, index_dim=32)
Q_HEADS, LAYER = 8, 1


def expand(positions: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotation factors as `norm_rope_heads` reads them."""
    angle = positions[:, None].float() * INV_FREQ
    rest = head_dim - 2 * HALF
    ones, zeros = torch.ones(len(positions), rest), torch.zeros(len(positions), rest)
    return torch.cat((angle.cos(), angle.cos(), ones), 1), torch.cat((-angle.sin(), angle.sin(), zeros), 1)


def head(x: torch.Tensor, weight: torch.Tensor, position: int) -> torch.Tensor:
    """One token's heads [H, d], normalised and rotated as complex numbers."""
    y = gemma_rms_norm(x, weight, EPS)
    turned = torch.complex(y[:, :HALF], y[:, HALF : 2 * HALF]) * torch.polar(torch.ones(HALF), position * INV_FREQ)
    return torch.cat((turned.real, turned.imag, y[:, 2 * HALF :]), 1)


def lanes(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V [pages, kv_heads, 128, d] and index key [pages, 1, 128, d] views of the layer under test."""
    pages, kv, d = cache.shape[0], LAYOUT.kv_heads, LAYOUT.head_dim
    flat = cache.view(pages, -1)
    k, v, i = LAYOUT.key_offset(LAYER), LAYOUT.value_offset(LAYER), LAYOUT.index_offset(LAYER)
    return (
        flat[:, k:v].view(pages, kv, 128, d),
        flat[:, v:i].view(pages, kv, 128, d),
        flat[:, i : i + 128 * d].view(pages, 1, 128, d),
    )


def oracle(
    projected: torch.Tensor, positions: list[int], table: torch.Tensor, norms: MsaNorms, cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [rows, heads * d] and the cache after the step, by the references, one row at a time."""
    kv, d = LAYOUT.kv_heads, LAYOUT.head_dim
    cache = cache.clone()
    out = torch.zeros(len(positions), Q_HEADS * d)
    for r, position in enumerate(positions):
        if position < 0:
            continue
        q, k, v, iq, ik = projected[r].view(-1, d).split((Q_HEADS, kv, kv, kv, 1))
        key, value, index = lanes(cache)
        page, slot = int(table[r, position // 128]), position % 128
        key[page, :, slot] = head(k, norms.key, position)
        value[page, :, slot] = v
        index[page, :, slot] = head(ik, norms.index_key, position)
        pages = table[r, : position // 128 + 1]
        at = torch.tensor([position])
        keys, values = gather_pages(key, pages), gather_pages(value, pages)
        indices = gather_pages(index, pages)[:, 0]
        scores = index_block_scores(head(iq, norms.index_query, position)[None], indices, at)
        chosen = select_blocks(scores, at, 16)
        got = sparse_attention(head(q, norms.query, position)[None], keys, values, at, chosen, d**-0.5)
        out[r] = got.flatten()
    return out, cache


@pytest.mark.parametrize(
    ("positions", "plan"),
    [
        ([0, -1, 126, 127, 128], MsaPlan(chunks=1, splits=4, tile=128)),
        ([2046, 2047, 2048], MsaPlan(chunks=5, splits=32, tile=64, fused_blocks=0)),
        ([2600, 0], MsaPlan(chunks=24, splits=16, tile=128, fused_blocks=0)),
    ],
)
def test_msa_decode_is_the_reference(positions: list[int], plan: MsaPlan) -> None:
    gen = torch.Generator().manual_seed(sum(positions))
    rows, pages = len(positions), 40
    shape = MsaShape(q_heads=Q_HEADS, layout=LAYOUT, rotary_dim=16, max_blocks=24)
    norms = MsaNorms(*(torch.randn(LAYOUT.head_dim, generator=gen) * 0.2 for _ in range(4)))
    cache = torch.randn(pages, LAYOUT.page_stride, generator=gen)
    # Rows share the pages of a common prefix and own their last one; page 0 is the null page and is poisoned.
    table = torch.zeros(rows, 24, dtype=torch.int32)
    order = torch.randperm(pages - 1, generator=gen).int() + 1
    for r, position in enumerate(positions):
        if position >= 0:
            table[r, : position // 128] = order[: position // 128]
            table[r, position // 128] = order[-1 - r]
    cache[0] = float("nan")
    projected = torch.randn(rows, shape.projected_width, generator=gen)
    expected, expected_cache = oracle(projected, positions, table, norms, cache)
    at = torch.tensor(positions, dtype=torch.int32)
    cos, sin = expand(at, LAYOUT.head_dim)
    out = torch.full((rows, Q_HEADS * LAYOUT.head_dim), float("nan"))
    scratch = MsaScratch.allocate(rows, shape, plan, torch.device("cpu"))
    for buffer in (scratch.scores, scratch.partial, scratch.partial_max, scratch.partial_sum):
        buffer.fill_(float("nan"))
    msa_decode(projected, DecodeRows(at, table, cos, sin), norms, cache, LAYER, out, shape, plan, scratch)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache, expected_cache, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("init", "local"), [(0, 1), (2, 1), (1, 3), (9, 8)])
@pytest.mark.parametrize("blocks", [1, 5, 16, 17, 24, 60])
def test_selection_is_that_of_a_sort(blocks: int, init: int, local: int) -> None:
    """Also where scores tie, are NaN or infinite; each row has fewer blocks than the last."""
    from longturn.kernels.msa_decode_choose import _select

    gen = torch.Generator().manual_seed(blocks)
    rows, heads, top = 6, 2, 16
    counts = [max(0, blocks - 3 * r) for r in range(rows)]
    scores = torch.randn(rows, heads, 64, generator=gen)
    scores[0] = scores[0].round() + 0.0  # no -0, which is below 0 to the kernels
    scores[1] = 0.0
    scores[2, :, ::3] = float("nan")
    scores[3, :, ::5] = float("-inf")
    scores[3, :, 1::5] = float("inf")
    table = torch.randperm(rows * 64, generator=gen).int().view(rows, 64)
    selected, pages = torch.full((2, rows, heads, top), 99, dtype=torch.int32)
    positions = torch.tensor([128 * count - 1 if count else -1 for count in counts], dtype=torch.int32)
    _select[(heads, rows)](
        positions, table, 64, scores, 64, selected, pages,
        KV_HEADS=heads, PAGE=128, TOP=top, INIT=init, LOCAL=local, BLOCKS=64, PDL=False,
    )  # fmt: skip
    for r, count in enumerate(counts):
        for h in range(heads):

            def rank(block: int, r: int = r, h: int = h, count: int = count) -> tuple[bool, float, int]:
                score = float(scores[r, h, block])
                is_forced = block < init or block >= count - local
                return (not is_forced, 0.0 if is_forced else math.inf if math.isnan(score) else -score, block)

            best = sorted(sorted(range(count), key=rank)[:top])
            left = top - len(best)
            assert selected[r, h].tolist() == best + [-1] * left
            assert pages[r, h].tolist() == [int(table[r, block]) for block in best] + [0] * left
