"""Sparse attention of many tokens in Triton's interpreter, against the torch references. fp32 data: the interpreter
does bf16 arithmetic on the raw bits."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when triton and each kernel are imported, so it must precede both
pytest.importorskip("triton", reason="triton is not installed")
if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
    pytest.skip("the interpreter of Triton 3.6 needs numpy below 2.4", allow_module_level=True)

from longturn.kernels.msa_many import MsaManyPlan, MsaManyScratch, msa_many_tokens
from longturn.kernels.msa_many_attend import combine_parts, fill_lists, lay_out_lists
from longturn.kernels.msa_many_scores import top_blocks
from longturn.kernels.msa_plan import MsaNorms, MsaShape
from longturn.kernels.pages import PageLayout
from longturn.ops.msa import select_blocks
from tests.kernels.many_steps import EPS, expected_attention, lanes, many_step

LAYOUT = PageLayout(layers=2, kv_heads=2, head_dim=32, index_dim=32)
Q_HEADS, LAYER, BLOCKS, PAGES = 8, 1, 24, 60
INV_FREQ = 10000.0 ** (-torch.arange(8, dtype=torch.float32) / 8)
SHAPE = MsaShape(q_heads=Q_HEADS, layout=LAYOUT, rotary_dim=16, max_blocks=BLOCKS, eps=EPS)
PLAN = MsaManyPlan(score_programs=3, score_tokens=32, piece=32, attend_tokens=16, attend_programs=3)


def page_table(spans: list[tuple[int, int]], gen: torch.Generator) -> torch.Tensor:
    """Rows share whole cached pages of one prefix, in shuffled order, and own what they write."""
    order = torch.randperm(PAGES - 1, generator=gen).int() + 1
    shared, own = order[:BLOCKS], iter(order[BLOCKS:].tolist())
    table = torch.zeros(len(spans), BLOCKS, dtype=torch.int32)
    for r, (cached, new) in enumerate(spans):
        whole, last = cached // 128, (cached + new - 1) // 128
        table[r, :whole] = shared[:whole]
        for block in range(whole, last + 1):
            table[r, block] = next(own)
    return table


def poisoned(scratch: MsaManyScratch) -> MsaManyScratch:
    for buffer in vars(scratch).values():
        buffer.fill_(float("nan") if buffer.is_floating_point() else 77)
    return scratch


@pytest.mark.parametrize(
    ("spans", "bucket", "plan"),
    [
        ([(0, 1)], 4, PLAN),
        ([(0, 3), (126, 1), (120, 10)], 18, PLAN),
        ([(127, 2), (2047, 1), (2048, 1)], 8, replace(PLAN, score_programs=40, score_tokens=64)),
        ([(2048, 1), (2049, 2), (127, 1), (0, 1)], 6, replace(PLAN, attend_tokens=4, attend_programs=7)),
        ([(2110, 19)], 20, replace(PLAN, piece=64, score_programs=1, score_tokens=16)),
        ([(2940, 12), (2816, 5)], 20, replace(PLAN, score_tokens=16, attend_programs=1)),
    ],
)
def test_msa_many_is_the_reference(spans: list[tuple[int, int]], bucket: int, plan: MsaManyPlan) -> None:
    gen = torch.Generator().manual_seed(bucket)
    norms = MsaNorms(*(torch.randn(LAYOUT.head_dim, generator=gen) * 0.2 for _ in range(4)))
    cache = torch.randn(PAGES, LAYOUT.page_stride, generator=gen)
    cache[0] = float("nan")
    table = page_table(spans, gen)
    step = many_step(spans, bucket, table, INV_FREQ, LAYOUT.head_dim)
    projected = torch.randn(bucket, SHAPE.projected_width, generator=gen)
    expected, expected_cache = expected_attention(projected, step, norms, cache, LAYOUT, LAYER, Q_HEADS, INV_FREQ)
    for r, (cached, new) in enumerate(spans):  # What a broken request left in pages that others have now.
        last, used = divmod(cached + new - 1, 128)
        for lane in (*lanes(cache, LAYOUT, LAYER), *lanes(expected_cache, LAYOUT, LAYER)):
            lane[table[r, last], :, used + 1 :] = float("nan")
    out = torch.full((bucket, Q_HEADS * LAYOUT.head_dim), float("nan"))
    # Room for a larger bucket: a step uses the beginning.
    scratch = poisoned(MsaManyScratch.allocate(bucket + 50, PAGES, SHAPE, plan, cache))
    msa_many_tokens(projected, step, norms, cache, LAYER, out, SHAPE, plan, scratch)
    torch.testing.assert_close(cache, expected_cache, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5)


def test_scratch_may_hold_an_earlier_step() -> None:
    """Lengths that shrink and grow again over the same buffers leave nothing behind."""
    gen = torch.Generator().manual_seed(3)
    norms = MsaNorms(*(torch.randn(LAYOUT.head_dim, generator=gen) * 0.2 for _ in range(4)))
    scratch = poisoned(MsaManyScratch.allocate(8, PAGES, SHAPE, PLAN, torch.empty(0)))
    for spans in ([(2304, 8)], [(300, 5), (0, 1)], [(2450, 7)]):
        cache = torch.randn(PAGES, LAYOUT.page_stride, generator=gen)
        step = many_step(spans, 8, page_table(spans, gen), INV_FREQ, LAYOUT.head_dim)
        projected = torch.randn(8, SHAPE.projected_width, generator=gen)
        expected, _ = expected_attention(projected, step, norms, cache, LAYOUT, LAYER, Q_HEADS, INV_FREQ)
        out = torch.full((8, Q_HEADS * LAYOUT.head_dim), float("nan"))
        msa_many_tokens(projected, step, norms, cache, LAYER, out, SHAPE, PLAN, scratch)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5)


def test_entries_of_lists_fit_32_bits() -> None:
    """Choice times 128 plus a key: 2 heads of 16 blocks, so 2^19 tokens less one, as one choice is spare."""
    plain = torch.empty(0, device="meta")
    most = 2**31 // 128 // (2 * 16) - 1
    assert MsaManyScratch.allocate(most, PAGES, SHAPE, PLAN, plain).entries.dtype == torch.int32
    with pytest.raises(ValueError, match="too many for one step"):
        MsaManyScratch.allocate(most + 1, PAGES, SHAPE, PLAN, plain)


def test_parts_in_the_order_of_the_tensor_cores() -> None:
    """`attend_lists_hopper` stores columns as its threads hold them; combining them must not tell."""
    gen = torch.Generator().manual_seed(9)
    lines, group, d = 3, 8, 128
    parts = torch.randn(lines, 16, group, d, generator=gen)
    weights = torch.rand(lines, 16, group, 2, generator=gen) + 0.5
    selected = torch.arange(16, dtype=torch.int32).repeat(lines, 1)
    selected[1, 5:] = -1
    share = torch.where(selected[:, :, None] >= 0, weights[..., 0].exp2(), torch.tensor(0.0))
    sums = (share * weights[..., 1]).sum(1)
    expected = (share[..., None] * parts).sum(1) / sums[..., None]
    # A tensor-core tile gives thread u of a row columns 8 b + 2 u + e of 32; it stores those 8 one after the other.
    stored = parts.view(lines, 16, group, 4, 4, 4, 2).transpose(4, 5).reshape(parts.shape).contiguous()
    for of, ordered in ((parts, False), (stored, True)):
        out = torch.full((lines, group, d), float("nan"))
        combine_parts[(lines, 1)](
            selected, of, weights, out, GROUP=group, HEADS=group, D=d, TOP=16, FORMAT=0, ORDERED=ordered, PDL=False
        )
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("init", "local"), [(0, 1), (2, 3), (1, 2), (7, 9), (0, 20)])
@pytest.mark.parametrize("full", [128, 256])
def test_top_blocks(init: int, local: int, full: int) -> None:
    """Ties, NaN, forced blocks, fewer blocks than 16; and the lists' lengths."""
    gen = torch.Generator().manual_seed(init)
    at = torch.tensor([5, 127, 128, 15 * 128, 16 * 128 + 3, 150 * 128, -1, 199 * 128], dtype=torch.int32)
    tokens, kv, pages = len(at), 2, 300
    scores = torch.randint(0, 9, (tokens, kv, 256), generator=gen).float() - 4  # many ties
    scores[5, 1, 20:60] = float("nan")
    scores[7, 0, :] = float("nan")
    block = torch.arange(256)
    expected = select_blocks(scores, at.long().clamp(min=0), 16, init, local)
    expected[at < 0] = -1
    scores[:, :, :init] = float("nan")
    scores.masked_fill_((block >= (at.long() // 128 + 1 - local)[:, None])[:, None, :], float("nan"))
    table = torch.randperm(pages - 1, generator=gen)[:200].int()[None] + 1
    selected, ranks = torch.full((2, tokens, kv, 16), 99, dtype=torch.int32)
    counts = torch.zeros(pages, kv, dtype=torch.int32)
    top_blocks[(tokens * kv,)](
        at, torch.zeros_like(at), table, 200, scores, 256, selected, ranks, counts,
        KV_HEADS=kv, PAGE=128, TOP=16, INIT=init, LOCAL=local, FULL=full, REST=256 - full, PDL=False,
    )  # fmt: skip
    assert torch.equal(selected.long().sort(-1).values, expected.sort(-1).values)
    live = selected >= 0
    for head in range(kv):
        pages_of = table[0][selected[:, head][live[:, head]].long()].long()
        assert torch.equal(counts[:, head], torch.bincount(pages_of, minlength=pages).int())
        places = set(zip(pages_of.tolist(), ranks[:, head][live[:, head]].tolist(), strict=True))
        assert places == {(p, i) for p in range(pages) for i in range(int(counts[p, head]))}


@pytest.mark.parametrize(("full", "rest"), [(1024, 64), (2048, 128), (32, 0), (64, 32)])
@pytest.mark.parametrize("init", [0, 2])
def test_top_blocks_by_the_size_of_the_context(full: int, rest: int, init: int) -> None:
    """Contexts from a few blocks up to all there is room for; `select_blocks` says which blocks."""
    gen = torch.Generator().manual_seed(full)
    most = full + rest
    own = torch.tensor([0, 15, 16, 17, 31, most // 3, most // 2, most - 2, most - 1])
    at = (own.clamp(max=most - 1) * 128 + 5).int()
    scores = torch.randn(len(at), 1, most, generator=gen)
    scores[-1] = scores[-1].clamp(max=1.0)  # hundreds of blocks share the best score
    table = torch.randperm(most, generator=gen).int()[None] + 1
    selected, ranks = torch.full((2, len(at), 1, 16), 99, dtype=torch.int32)
    counts = torch.zeros(most + 1, 1, dtype=torch.int32)
    top_blocks[(len(at),)](
        at, torch.zeros_like(at), table, most, scores, most, selected, ranks, counts,
        KV_HEADS=1, PAGE=128, TOP=16, INIT=init, LOCAL=1, FULL=full, REST=rest, PDL=False,
    )  # fmt: skip
    expected = select_blocks(scores, at.long(), 16, init, 1)
    assert torch.equal(selected.long().sort(-1).values, expected.sort(-1).values)
    assert int(counts.sum()) == int((expected >= 0).sum())


@pytest.mark.parametrize("piece", [4, 32])
def test_lists(piece: int) -> None:
    """Every choice is in its page's list once, with the last key it sees, and pieces tell who needs a mask."""
    gen = torch.Generator().manual_seed(piece)
    tokens, kv, pages = 150, 2, 40
    at = torch.cat([torch.arange(700, 700 + tokens - 10), torch.full((10,), -1)]).int()
    table = torch.randperm(pages - 1, generator=gen)[:8].int()[None] + 1
    selected = torch.full((tokens, kv, 16), -1, dtype=torch.int32)
    for token in range(tokens - 10):
        own = int(at[token]) // 128
        for head in range(kv):
            chosen = torch.randperm(own, generator=gen)[:3].sort().values
            selected[token, head, :4] = torch.cat([chosen, torch.tensor([own])])
    choices = selected.numel()
    counts = torch.zeros(pages, kv, dtype=torch.int32)
    ranks = torch.full_like(selected, 77)
    for line, block in enumerate(selected.view(-1).tolist()):
        if block >= 0:
            counter = int(table[0, block]), line // 16 % kv
            ranks.view(-1)[line] = counts[counter]
            counts[counter] += 1
    most = choices // piece + counts.numel()
    first, lists, sizes, opens = (torch.full((n,), 77, dtype=torch.int32) for n in (counts.numel(), most, most, most))
    entries = torch.full((most * piece,), 77, dtype=torch.int32)
    total = torch.zeros(1, dtype=torch.int32)
    lay_out_lists[(1,)](
        counts, counts.numel(), first, lists, sizes, opens, total, PIECE=piece, SPAN=256, PDL=False
    )  # fmt: skip
    fill_lists[(-(-choices // 512),)](
        at, torch.zeros_like(at), table, 8, selected, ranks, first, opens, entries, choices,
        KV_HEADS=kv, PAGE=128, TOP=16, PIECE=piece, SPAN=512, PDL=False,
    )  # fmt: skip
    assert total.item() == (-(-counts // piece)).sum()
    seen = set()
    for number in range(int(total)):
        page, head = divmod(int(lists[number]), kv)
        here = entries[number * piece :][: int(sizes[number])].tolist()
        lasts = []
        for choice, last in (divmod(entry, 128) for entry in here):
            token, slot = divmod(choice, 16 * kv)
            block = int(selected[token, head, slot % 16])
            assert slot // 16 == head and table[0, block] == page
            assert last == min(int(at[token]) - 128 * block, 127)
            lasts.append(last)
            seen.add(choice)
        assert bool(opens[number]) == (min(lasts) < 127)
    assert seen == set((selected.view(-1) >= 0).nonzero().flatten().tolist())
