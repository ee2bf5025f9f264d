"""The edges of a step, and unpacked weights, in Triton's interpreter against plain indexing."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when triton and each kernel are imported, so it must precede both
pytest.importorskip("triton", reason="triton is not installed")
if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
    pytest.skip("the interpreter of Triton 3.6 needs numpy below 2.4", allow_module_level=True)

from longturn.kernels.packed_weights import PackedWeight, WeightFormat, random_packed
from longturn.kernels.step_edges import begin_step
from longturn.kernels.step_state import HEADER_WORDS, Arrival, begin_decode, pick_rows, scatter, token_ids
from longturn.kernels.unpack_weights import unpack


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 9000])
def test_scatter_writes_every_pair_and_nothing_else(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    state = torch.full((12000,), -7, dtype=torch.int32)
    to = torch.randperm(len(state), generator=generator)[:count].to(torch.int32)
    values = torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator).to(torch.int32)
    pairs = torch.full((HEADER_WORDS + 2 * count + 64,), 3, dtype=torch.int32)  # what follows is not read
    pairs[0] = count
    pairs[HEADER_WORDS : HEADER_WORDS + 2 * count] = torch.stack((to, values), 1).flatten()
    wanted = state.clone()
    wanted[to.long()] = values
    scatter(pairs, state)
    assert torch.equal(state, wanted)


@pytest.mark.parametrize("more", [0, 1, 240, 700])
def test_a_decode_step_begins_with_what_its_pairs_and_the_step_before_left(more: int) -> None:
    """Pairs set the inputs and `more` words of page tables, in any order; the state held other values before."""
    slots, entries, hidden = 4, 2048, 48
    state = torch.full((3 * slots + slots * entries + 4,), 7, dtype=torch.int32)
    token, row, position = (state[part * slots : (part + 1) * slots] for part in range(3))
    table, last = state[12 : 12 + slots * entries].view(slots, entries), state[-4:]
    table.copy_(torch.arange(slots * entries, dtype=torch.int32).view(slots, entries) + 1)
    last.copy_(ints(50, 51, 52, 53))
    given, rows, positions = ints(9, -1, -1, -1), ints(2, 0, 3, 1), ints(0, 128 * 1500 + 5, -1, 127)
    generator = torch.Generator().manual_seed(more)
    changed = torch.randperm(slots * entries, generator=generator)[:more].to(torch.int32)
    to = torch.cat((torch.arange(12, dtype=torch.int32), changed + 12))
    values = torch.cat((given, rows, positions, -changed - 100))
    order = torch.randperm(len(to), generator=generator)
    pairs = torch.full((HEADER_WORDS + 2 * len(to) + 64,), 3, dtype=torch.int32)  # what follows is not read
    pairs[0] = len(to)
    pairs[HEADER_WORDS : HEADER_WORDS + 2 * len(to)] = torch.stack((to[order], values[order]), 1).flatten()
    wanted = state.clone()
    wanted[to.long()] = values

    embedding, inv_freq = torch.randn(60, hidden, generator=generator), torch.rand(32, generator=generator)
    x, cos, sin = torch.empty(slots, hidden), torch.empty(slots, 128), torch.empty(slots, 128)
    tokens, batch = torch.full((slots,), -9, dtype=torch.int32), torch.full((slots, entries), -9, dtype=torch.int32)
    arrival = Arrival(pairs, state, token, row, last, table, max_blocks=entries, page_tokens=128)
    begin_decode(arrival, tokens, position, batch, embedding, inv_freq, x, cos, sin)
    assert torch.equal(state, wanted)
    assert tokens.tolist() == [9, 50, 0, 51]
    for slot, used in enumerate((1, 1501, 0, 1)):
        assert torch.equal(batch[slot, :used], table[rows[slot], :used])
        assert (batch[slot, used:] == -9).all(), "an entry that is not used was written"
    alone = [torch.empty_like(buffer) for buffer in (x, cos, sin)]
    begin_step(tokens, position, embedding, inv_freq, *alone)
    assert all(torch.equal(got, expected) for got, expected in zip((x, cos, sin), alone, strict=True))
    assert torch.equal(x, embedding[tokens.long()])


def test_token_ids_resolve_the_last_sampled_and_pad_with_zero() -> None:
    count = 300
    positions = torch.arange(count, dtype=torch.int32)
    positions[290:] = -1
    given = torch.arange(count, dtype=torch.int32) + 1000
    given[::7] = -1
    rows = torch.arange(count, dtype=torch.int32) % 3
    tokens = torch.full((count,), -9, dtype=torch.int32)
    token_ids(given, rows, positions, ints(1, 2, 3), tokens)
    wanted = torch.where(given < 0, rows + 1, given)
    wanted[290:] = 0
    assert torch.equal(tokens, wanted)


def test_pick_rows_copies_whole_rows() -> None:
    x = torch.randn(40, 6144)
    out = torch.full((3, 6144), torch.nan)
    pick_rows(x, ints(39, 0, 7), out)
    assert torch.equal(out, x[[39, 0, 7]])


@pytest.mark.parametrize("form", [WeightFormat.NVFP4, WeightFormat.MXFP8])
@pytest.mark.parametrize("width", [32, 96, 3072])
def test_unpacked_weights_are_the_packed_ones(form: WeightFormat, width: int) -> None:
    """Two experts of rows that fill no whole tile."""
    torch.manual_seed(1)
    weight = random_packed(form, 2, 9, width, scale=0.5, device="cpu")
    out = torch.full((2, 9, width), torch.nan)
    unpack(weight, out)
    torch.testing.assert_close(out, weight.dequantised(), rtol=1e-6, atol=0.0)


def test_unpack_says_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="cannot unpack PLAIN"):
        unpack(PackedWeight.plain(torch.zeros(2, 32)), torch.zeros(2, 32))
    weight = random_packed(WeightFormat.MXFP8, 2, 32, scale=1.0, device="cpu")
    with pytest.raises(ValueError, match="into"):
        unpack(weight, torch.zeros(2, 64))
