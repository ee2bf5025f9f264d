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
from longturn.kernels.step_state import HEADER_WORDS, decode_inputs, pick_rows, scatter, token_ids
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


def test_decode_inputs_gather_tokens_and_used_pages() -> None:
    last = ints(50, 51, 52, 53)
    table = torch.arange(4 * 2048, dtype=torch.int32).view(4, 2048) + 1
    positions, rows = ints(0, 128 * 1500 + 5, -1, 127), ints(2, 0, 3, 1)
    tokens, batch = torch.full((4,), -9, dtype=torch.int32), torch.full((4, 2048), -9, dtype=torch.int32)
    decode_inputs(ints(9, -1, -1, -1), rows, positions, last, table, tokens, batch, max_blocks=2048, page_tokens=128)
    assert tokens.tolist() == [9, 50, 0, 51]
    for slot, used in enumerate((1, 1501, 0, 1)):
        assert torch.equal(batch[slot, :used], table[rows[slot], :used])
        assert (batch[slot, used:] == -9).all(), "an entry that is not used was written"


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
