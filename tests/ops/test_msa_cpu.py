"""The paged CPU path of block-sparse attention against the plain reference, a brute-force choice and a dense mask."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from longturn.ops import msa
from longturn.ops.attention import PagedRows, plan_attention
from longturn.ops.kv_lane import FP8, Lane, Nvfp4Lane, PlainLane
from longturn.ops.msa_cpu import (
    GATHER_QUERIES,
    Selection,
    choose_blocks,
    dense_paged_attention,
    sparse_paged_attention,
)
from longturn.ops.nvfp4 import dequantize_lane, quantize_lane

HEADS, KV_HEADS, WIDTH, INDEX_WIDTH = 4, 2, 32, 16


@dataclass
class Row:
    """One sequence: its new queries, and contiguous keys and values of its whole context."""

    query: Tensor
    index_query: Tensor
    key: Tensor
    value: Tensor
    index_key: Tensor
    pages: list[int]

    @property
    def positions(self) -> Tensor:
        return torch.arange(len(self.key) - len(self.query), len(self.key))


def make_rows(shapes: list[tuple[int, int]], seed: int) -> list[Row]:
    """Rows of (context, new queries) with shuffled pages."""
    generator = torch.Generator().manual_seed(seed)
    pages = list(range(1, 1 + sum(-(-context // 128) for context, _ in shapes)))
    random.Random(seed).shuffle(pages)

    def draw(*shape: int) -> Tensor:
        return torch.empty(shape).normal_(generator=generator)

    rows = []
    for context, new in shapes:
        count = -(-context // 128)
        taken, pages = pages[:count], pages[count:]
        rows.append(
            Row(
                draw(new, HEADS, WIDTH), draw(new, KV_HEADS, INDEX_WIDTH), draw(context, KV_HEADS, WIDTH),
                draw(context, KV_HEADS, WIDTH), draw(context, 1, INDEX_WIDTH), taken,
            )
        )  # fmt: skip
    return rows


def plan_of(rows: list[Row]):  # type: ignore[no-untyped-def]
    starts = torch.tensor([0, *torch.tensor([len(row.query) for row in rows]).cumsum(0)], dtype=torch.int32)
    contexts = torch.tensor([len(row.key) for row in rows], dtype=torch.int32)
    table = torch.zeros((len(rows), max(len(row.pages) for row in rows)), dtype=torch.int32)
    for i, row in enumerate(rows):
        table[i, : len(row.pages)] = torch.tensor(row.pages, dtype=torch.int32)
    return plan_attention(PagedRows(starts, contexts, table), torch.cat([row.positions for row in rows]))


def fill(lane: Lane, rows: list[Row], name: str) -> None:
    for row in rows:
        position = torch.arange(len(row.key))
        lane.write(torch.tensor(row.pages)[position // 128], position % 128, getattr(row, name))


def plain_lane(pages: int, heads: int, width: int, dtype: torch.dtype = torch.float32) -> PlainLane:
    size = torch.empty((pages, heads, 128, width), dtype=dtype).view(torch.uint8)
    return PlainLane(size.fill_(0xFF).view(dtype))  # NaN wherever nothing is written


def nvfp4_lane(pages: int, heads: int, width: int) -> Nvfp4Lane:
    codes = torch.full((pages, heads, 128, width // 2), 0xFF, dtype=torch.uint8)
    scales = torch.full((pages, heads, 128, width // 16), 0xFF, dtype=torch.uint8)
    return Nvfp4Lane(codes, scales.view(torch.float8_e4m3fn))


def run(rows: list[Row], selection: Selection) -> Tensor:
    pages = 1 + max(page for row in rows for page in row.pages)
    key, value = plain_lane(pages, KV_HEADS, WIDTH), plain_lane(pages, KV_HEADS, WIDTH)
    index = plain_lane(pages, 1, INDEX_WIDTH)
    for lane, name in ((key, "key"), (value, "value"), (index, "index_key")):
        fill(lane, rows, name)
    query, index_query = torch.cat([row.query for row in rows]), torch.cat([row.index_query for row in rows])
    return sparse_paged_attention(plan_of(rows), query, index_query, key, value, index, selection)


def brute_force(row: Row, selection: Selection) -> Tensor:
    """bool [queries, KV heads, context]: what each may see, by loops and a sort of scores."""
    seen = torch.zeros((len(row.query), KV_HEADS, len(row.key)), dtype=torch.bool)
    for i, position in enumerate(row.positions.tolist()):
        own = position // 128
        for head in range(KV_HEADS):
            scores = [
                float((row.index_key[128 * b : min(128 * b + 128, position + 1), 0] @ row.index_query[i, head]).max())
                for b in range(own + 1)
            ]
            forced = [b for b in range(own + 1) if b < selection.init or b > own - selection.local]
            others = sorted(set(range(own + 1)) - set(forced), key=lambda b: -scores[b])
            for block in (forced + others)[: selection.top]:
                seen[i, head, 128 * block : min(128 * block + 128, position + 1)] = True
    return seen


def dense_oracle(row: Row, seen: Tensor) -> Tensor:
    """Dense attention under a mask in float64."""
    group = HEADS // KV_HEADS
    key, value = (t.double().repeat_interleave(group, dim=1) for t in (row.key, row.value))
    logits = torch.einsum("qhd,khd->qhk", row.query.double(), key) / WIDTH**0.5
    logits = logits.masked_fill(~seen.repeat_interleave(group, dim=1), float("-inf"))
    return torch.einsum("qhk,khd->qhd", logits.softmax(-1), value)


SELECTIONS = [Selection(3), Selection(4, init=1), Selection(4, init=1, local=2), Selection(2, local=0), Selection(1)]


@pytest.mark.parametrize("selection", SELECTIONS)
def test_output_equals_a_dense_mask_of_a_brute_force_selection(selection: Selection) -> None:
    rows = make_rows([(1300, 1), (900, 40), (128, 3), (700, GATHER_QUERIES), (129, 129), (600, 600)], seed=3)
    got = run(rows, selection).split([len(row.query) for row in rows])
    for row, out in zip(rows, got, strict=True):
        want = dense_oracle(row, brute_force(row, selection))
        assert float((out.double() - want).abs().max()) < 1e-5


@pytest.mark.parametrize("seed", range(6))
def test_random_steps_equal_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    selection = Selection(rng.randint(2, 6), init=rng.randint(0, 1))
    contexts = [rng.choice((rng.randint(1, 300), rng.randint(300, 2000), 128 * rng.randint(1, 12))) for _ in range(4)]
    rows = make_rows([(context, rng.choice((1, 2, 9, min(context, 200)))) if context > 9 else (context, 1)
                      for context in contexts], seed)  # fmt: skip
    got = run(rows, selection).split([len(row.query) for row in rows])
    for row, out in zip(rows, got, strict=True):
        scores = msa.index_block_scores(row.index_query, row.index_key[:, 0], row.positions)
        chosen = msa.select_blocks(scores, row.positions, selection.top, selection.init, selection.local)
        want = msa.sparse_attention(row.query, row.key, row.value, row.positions, chosen, WIDTH**-0.5)
        assert float((out - want).abs().max()) < 1e-5


def test_choice_is_the_brute_force_one_and_ties_go_by_score() -> None:
    (row,) = make_rows([(1000, 30)], seed=9)
    row.index_key = row.index_key.round()  # makes ties
    row.index_query = row.index_query.round()
    lane = plain_lane(1 + max(row.pages), 1, INDEX_WIDTH)
    fill(lane, [row], "index_key")
    selection = Selection(4)
    chosen = choose_blocks(row.index_query, lane, torch.tensor(row.pages), row.positions, selection)
    scores = msa.index_block_scores(row.index_query, row.index_key[:, 0], row.positions)
    for i, position in enumerate(row.positions.tolist()):
        own = position // 128
        for head in range(KV_HEADS):
            blocks = chosen[i, head].tolist()
            assert len(set(blocks)) == 4 and own in blocks and max(blocks) <= own
            got = sorted(float(scores[i, head, b]) for b in blocks if b != own)
            want = sorted((float(scores[i, head, b]) for b in range(own)), reverse=True)[:3]
            assert got == want[::-1]


def test_blocks_that_nobody_chose_are_not_read() -> None:
    """Poisoned keys and values outside the choice change nothing; a poisoned index key does."""
    (row,) = make_rows([(1500, 1)], seed=4)
    selection = Selection(3)
    want = run([row], selection)
    seen = brute_force(row, selection).any(1)[0]
    assert 0 < int(seen.sum()) < 1000
    row.key[~seen], row.value[~seen] = float("nan"), float("nan")
    assert torch.equal(run([row], selection), want)
    row.index_key[~seen] = 100.0 * row.index_query[0, 0]
    assert not torch.equal(run([row], selection), want)


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_packed_lanes_equal_plain_lanes_that_hold_the_same_values(kind: str) -> None:
    """Only storage differs: attention over packed keys equals attention over what they decode to."""
    rows = make_rows([(700, 60), (900, 1), (200, 5)], seed=8)
    pages = 1 + sum(len(row.pages) for row in rows)
    packed: list[Lane] = []
    for heads, width in ((KV_HEADS, WIDTH), (KV_HEADS, WIDTH), (1, INDEX_WIDTH)):
        packed.append(nvfp4_lane(pages, heads, width) if kind == "nvfp4" else plain_lane(pages, heads, width, FP8))
    names = ("key", "value", "index_key")
    for lane, name in zip(packed, names, strict=True):
        fill(lane, rows, name)
    query, index_query = torch.cat([row.query for row in rows]), torch.cat([row.index_query for row in rows])
    got = sparse_paged_attention(plan_of(rows), query, index_query, packed[0], packed[1], packed[2], Selection(3))
    dense = dense_paged_attention(plan_of(rows), query, packed[0], packed[1])
    exact = run(rows, Selection(3))
    assert float((got - exact).abs().max()) > 1e-3, "the storage must have cost something"
    for row in rows:
        for name in names:
            x = getattr(row, name)
            stored = dequantize_lane(*quantize_lane(x)) if kind == "nvfp4" else x.to(FP8).float()
            setattr(row, name, stored)
    assert torch.equal(got, run(rows, Selection(3)))
    outs = dense.split([len(row.query) for row in rows])
    for row, out in zip(rows, outs, strict=True):
        everything = (torch.arange(len(row.key)) <= row.positions[:, None])[:, None].expand(-1, KV_HEADS, -1)
        assert float((out.double() - dense_oracle(row, everything)).abs().max()) < 1e-5


def test_fp8_storage_saturates() -> None:
    lane = plain_lane(2, 1, 16, FP8)
    lane.write(torch.tensor([1]), torch.tensor([0]), torch.full((1, 1, 16), -1e6))
    assert lane.read(torch.tensor([1]), torch.float32)[0, 0, 0].tolist() == [-448.0] * 16
