"""The edges of a step on the device: the host's differences go in, the last sampled tokens feed the next step.

    scatter          (destination, value) pairs of one packed copy into the int32 state
    begin_decode     the same as the first kernel of a decode step; then its token ids, each slot's page table, gathered
                     from its row's, and what `begin_step` does with both
    token_ids        the same token ids for a step of many tokens, which reads page tables through `rows`
    pick_rows        hidden states of the tokens that are sampled after

A token id of -1 in a step's inputs stands for the last token that the row sampled: the host may not have seen it yet.
"""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from longturn.kernels.dependent import FRESH, launch_options, wait_then_release
from longturn.kernels.step_edges import begin_row

HEADER_WORDS = 2
"""Words before the first pair: the number of pairs, and one for other kernels (`Sampled.turn`), which keeps pairs on
8-byte boundaries."""
_PROGRAMS = 32
_BLOCK = 256
_BEGIN_BLOCK = 1024


@triton.jit
def _apply(pairs, state, first, step, HEADER: tl.constexpr, BLOCK: tl.constexpr):
    """Pairs first .., BLOCK of every `step`, into the state."""
    count = tl.load(pairs)
    for start in tl.range(first, count, step):
        i = start + tl.arange(0, BLOCK)
        ok = i < count
        to = tl.load(pairs + HEADER + 2 * i, mask=ok, other=0)
        value = tl.load(pairs + HEADER + 2 * i + 1, mask=ok, other=0)
        tl.store(state + to, value, mask=ok)


@triton.jit
def _scatter(pairs, state, HEADER: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    _apply(pairs, state, tl.program_id(0) * BLOCK, PROGRAMS * BLOCK, HEADER, BLOCK)


def scatter(pairs: Tensor, state: Tensor) -> None:
    """state[destination] = value for each pair; destinations of one call are all different.

    pairs int32: the number of pairs, a word that is not read, then destination and value in turn. state int32, flat.
    """
    _scatter[(_PROGRAMS,)](pairs, state, HEADER=HEADER_WORDS, PROGRAMS=_PROGRAMS, BLOCK=_BLOCK, num_warps=4)


@triton.jit
def _token_of(step_token, step_row, last_token, at, ok):
    """Token ids at indices `at`: those given, or the last that the row sampled."""
    given = tl.load(step_token + at, mask=ok, other=0, cache_modifier=FRESH)
    row = tl.load(step_row + at, mask=ok, other=0, cache_modifier=FRESH)
    sampled = tl.load(last_token + row, mask=ok & (given < 0), other=0, cache_modifier=FRESH)
    return tl.where(given < 0, sampled, given)


@triton.jit(do_not_specialize=["room"])
def _begin_decode(
    pairs, room, state, step_token, step_row, positions, last_token, page_table, table_stride, tokens, batch_table,
    batch_stride, embedding, inv_freq, x, cos, sin,
    HEADER: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr,
    PIECE: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    part = tl.program_id(1)
    # Every program applies all of the pairs, so that none waits for another: it reads only what it has written itself,
    # and whoever writes a word twice writes the same value.
    i = tl.arange(0, PAIRS)
    # The first pairs beside their number, not after it: few steps have more.
    to = tl.load(pairs + HEADER + 2 * i, mask=i < room, other=0)
    value = tl.load(pairs + HEADER + 2 * i + 1, mask=i < room, other=0)
    tl.store(state + to, value, mask=i < tl.load(pairs))
    _apply(pairs, state, PAIRS, PAIRS, HEADER, PAIRS)
    tl.debug_barrier()
    position = tl.load(positions + slot, cache_modifier=FRESH)
    if position >= 0:
        row = tl.load(step_row + slot, cache_modifier=FRESH)
        at = part * BLOCK + tl.arange(0, BLOCK)
        used = at <= position // PAGE
        pages = tl.load(page_table + row.to(tl.int64) * table_stride + at, mask=used, other=0, cache_modifier=FRESH)
        tl.store(batch_table + slot.to(tl.int64) * batch_stride + at, pages, mask=used)
    if part == 0:
        one = slot + tl.arange(0, 1)
        token = _token_of(step_token, step_row, last_token, one, (one >= 0) & (position >= 0))
        tl.store(tokens + one, token)
        word = tl.sum(token, axis=0).to(tl.int64)
        begin_row(slot, word, position, embedding, inv_freq, x, cos, sin, WIDTH, PIECE, D, HALF)
    # No release: the next kernel may let the one after it read positions and page tables ahead (see dependent.py), so
    # it must not start before all of this is done.


@dataclass(frozen=True)
class Arrival:
    """What a decode step's first kernel takes from the host, and from the step before. All int32, on one device."""

    pairs: Tensor
    """As for `scatter`."""
    state: Tensor
    """Flat; the next five are parts of it."""
    token: Tensor
    """[B]: token id of each slot, -1 for the last one that its row sampled."""
    row: Tensor
    """[B]: row of each slot."""
    last_token: Tensor
    """[rows]; the pairs do not change it."""
    page_table: Tensor
    """[rows, P]."""
    max_blocks: int
    """Most pages that a slot may have."""
    page_tokens: int


def begin_decode(
    arrival: Arrival, tokens: Tensor, positions: Tensor, batch_table: Tensor, embedding: Tensor, inv_freq: Tensor,
    x: Tensor, cos: Tensor, sin: Tensor,
) -> None:  # fmt: skip
    """`scatter` of the arrival's pairs; then tokens[i] for each of B slots, batch_table[i] = page_table[row[i]] up to
    the slot's own page, and `begin_step` over both.

    tokens, positions int32 [B], of which positions are a part of the state that the pairs may set: a padded slot has
    -1 and gets token 0; batch_table int32 [B, P']. Must be a step's first launch, and is never dependent.
    """
    a, width, block = arrival, x.shape[1], _BEGIN_BLOCK
    _begin_decode[(tokens.shape[0], triton.cdiv(a.max_blocks, block))](
        a.pairs, (a.pairs.shape[0] - HEADER_WORDS) // 2, a.state, a.token, a.row, positions, a.last_token,
        a.page_table, a.page_table.stride(0), tokens, batch_table, batch_table.stride(0), embedding, inv_freq, x, cos,
        sin,
        HEADER=HEADER_WORDS, PAGE=a.page_tokens, BLOCK=block, PAIRS=_BLOCK, WIDTH=width, PIECE=width & -width,
        D=cos.shape[1], HALF=inv_freq.shape[0], num_warps=4,
    )  # fmt: skip


@triton.jit
def _token_ids(step_token, step_row, positions, last_token, tokens, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_then_release(PDL)
    ok = at < count
    present = tl.load(positions + at, mask=ok, other=-1, cache_modifier=FRESH) >= 0
    tl.store(tokens + at, _token_of(step_token, step_row, last_token, at, present), mask=ok)


def token_ids(
    step_token: Tensor, step_row: Tensor, positions: Tensor, last_token: Tensor, tokens: Tensor, *, pdl: bool = False
) -> None:
    """tokens[t] for T tokens, as `begin_decode` finds them; padding (position -1) gets 0."""
    count = tokens.shape[0]
    _token_ids[(triton.cdiv(count, _BLOCK),)](
        step_token, step_row, positions, last_token, tokens, count, BLOCK=_BLOCK, num_warps=4, PDL=pdl,
        **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _pick_rows(x, index, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    slot = tl.program_id(0)
    row = tl.load(index + slot, cache_modifier=FRESH).to(tl.int64)
    column = tl.arange(0, BLOCK)
    for k in tl.static_range(0, WIDTH, BLOCK):
        value = tl.load(x + row * WIDTH + k + column, cache_modifier=FRESH)
        tl.store(out + slot.to(tl.int64) * WIDTH + k + column, value)


def pick_rows(x: Tensor, index: Tensor, out: Tensor) -> None:
    """out[s] = x[index[s]]: x [T, n], index int32 [S], out [S, n] of the type of x."""
    width = x.shape[1]
    block = min(width & -width, 2048)
    _pick_rows[(out.shape[0],)](x, index, out, WIDTH=width, BLOCK=block, num_warps=4)
