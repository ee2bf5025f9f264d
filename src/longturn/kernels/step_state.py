"""The edges of a step on the device: the host's differences go in, the last sampled tokens feed the next step.

    scatter          (destination, value) pairs of one packed copy into the int32 state
    decode_inputs    a decode step's token ids, and each slot's page table, gathered from its row's
    token_ids        the same token ids for a step of many tokens, which reads page tables through `rows`
    pick_rows        hidden states of the tokens that are sampled after

A token id of -1 in a step's inputs stands for the last token that the row sampled: the host may not have seen it yet.
"""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from longturn.kernels.dependent import FRESH, launch_options, wait_then_release

HEADER_WORDS = 2
"""Words before the first pair: the number of pairs, and one that keeps pairs on 8-byte boundaries."""
_PROGRAMS = 32
_BLOCK = 256


@triton.jit
def _scatter(pairs, state, HEADER: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    count = tl.load(pairs)
    for start in tl.range(tl.program_id(0) * BLOCK, count, PROGRAMS * BLOCK):
        i = start + tl.arange(0, BLOCK)
        ok = i < count
        to = tl.load(pairs + HEADER + 2 * i, mask=ok, other=0)
        value = tl.load(pairs + HEADER + 2 * i + 1, mask=ok, other=0)
        tl.store(state + to, value, mask=ok)


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


@triton.jit
def _decode_inputs(
    step_token, step_row, positions, last_token, page_table, table_stride, tokens, batch_table, batch_stride,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    part = tl.program_id(1)
    wait_then_release(PDL)
    position = tl.load(positions + slot, cache_modifier=FRESH)
    if position >= 0:
        row = tl.load(step_row + slot, cache_modifier=FRESH)
        at = part * BLOCK + tl.arange(0, BLOCK)
        used = at <= position // PAGE
        pages = tl.load(page_table + row.to(tl.int64) * table_stride + at, mask=used, other=0, cache_modifier=FRESH)
        tl.store(batch_table + slot.to(tl.int64) * batch_stride + at, pages, mask=used)
    if part == 0:
        one = slot + tl.arange(0, 1)
        tl.store(tokens + one, _token_of(step_token, step_row, last_token, one, (one >= 0) & (position >= 0)))


def decode_inputs(
    step_token: Tensor, step_row: Tensor, positions: Tensor, last_token: Tensor, page_table: Tensor,
    tokens: Tensor, batch_table: Tensor, *, max_blocks: int, page_tokens: int, pdl: bool = False,
) -> None:  # fmt: skip
    """tokens[i] for each of B slots, and batch_table[i] = page_table[step_row[i]] up to the slot's own page.

    All int32. step_token, step_row, positions, tokens [B]; a padded slot has position -1 and gets token 0. last_token
    [rows]; page_table [rows, P]; batch_table [B, P']; `max_blocks` bounds a slot's pages.
    """
    block = 1024
    _decode_inputs[(tokens.shape[0], triton.cdiv(max_blocks, block))](
        step_token, step_row, positions, last_token, page_table, page_table.stride(0), tokens, batch_table,
        batch_table.stride(0), PAGE=page_tokens, BLOCK=block, num_warps=4, PDL=pdl, **launch_options(pdl),
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
    """tokens[t] for T tokens, as `decode_inputs` finds them; padding (position -1) gets 0."""
    count = tokens.shape[0]
    _token_ids[(triton.cdiv(count, _BLOCK),)](
        step_token, step_row, positions, last_token, tokens, count, BLOCK=_BLOCK, num_warps=4, PDL=pdl,
        **launch_options(pdl),
    )  # fmt: skip


@triton.jit
def _pick_rows(x, index, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    slot = tl.program_id(0)
    wait_then_release(PDL)
    row = tl.load(index + slot, cache_modifier=FRESH).to(tl.int64)
    column = tl.arange(0, BLOCK)
    for k in tl.static_range(0, WIDTH, BLOCK):
        value = tl.load(x + row * WIDTH + k + column, cache_modifier=FRESH)
        tl.store(out + slot.to(tl.int64) * WIDTH + k + column, value)


def pick_rows(x: Tensor, index: Tensor, out: Tensor, *, pdl: bool = False) -> None:
    """out[s] = x[index[s]]: x [T, n], index int32 [S], out [S, n] of the type of x."""
    width = x.shape[1]
    block = min(width & -width, 2048)
    _pick_rows[(out.shape[0],)](x, index, out, WIDTH=width, BLOCK=block, num_warps=4, PDL=pdl, **launch_options(pdl))
