"""The second sampling kernel: one program a row chooses the token from what the parts kept."""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from longturn.kernels.dependent import FRESH, wait_then_release
from longturn.kernels.sampling_common import (
    BEST,
    CUT,
    FIELDS,
    LOGPROBS,
    MASS,
    MIN_P,
    NONE,
    PENALTY_SLOT,
    RAW_SUM,
    RAW_TOP,
    TEMPERATURE,
    TOP,
    TOP_K,
    TOP_P,
    TOP_ROW,
    order_key,
    random_stream,
    row_number,
    row_word,
)
from longturn.kernels.sampling_search import first_survivor, race_of_row, truncated


@triton.jit(do_not_specialize_on_alignment=["turn"])
def finish_rows(
    logits, rows, positions, words, penalties, vocab, floats, indices, values, candidates, adjusted,
    top_values, top_ids, tokens, last_tokens, logprobs, out_ids, out_logprobs, turn, turn_words,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FEEDS: tl.constexpr, TURNS: tl.constexpr,
    FULL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """tokens, logprobs [S], out_ids, out_logprobs [S, MAX_LOGPROBS]; with FEEDS the token to `last_tokens` [rows] too.

    With TURNS the word at `turn` says how many times `turn_words` further on they are.

    The other buffers are those of `SampleScratch`, which `sample_parts` wrote with the same PARTS, WIDTH and FULL. The
    grid is (S,); a sample of row -1 is padding, and nothing of it is written.
    """
    sample = tl.program_id(0)
    wait_then_release(PDL)
    row = tl.load(rows + sample, cache_modifier=FRESH)
    if row < 0:
        return
    position = tl.load(positions + sample, cache_modifier=FRESH)
    if TURNS:
        further = tl.load(turn, cache_modifier=FRESH).to(tl.int64) * turn_words
        tokens += further
        logprobs += further
        out_ids += further
        out_logprobs += further
    fields = floats + sample * FIELDS * PARTS + tl.arange(0, PARTS)
    tops = tl.load(fields + TOP * PARTS, cache_modifier=FRESH)
    raw_tops = tl.load(fields + RAW_TOP * PARTS, cache_modifier=FRESH)
    top = tl.max(tops, axis=0)
    raw_top = tl.max(tl.where(raw_tops == raw_tops, raw_tops, float("-inf")), axis=0)
    broken = tl.max((raw_tops != raw_tops).to(tl.int32), axis=0) != 0
    broken |= (raw_top == float("inf")) | (raw_top == float("-inf")) | (top == float("inf")) | (top == float("-inf"))
    temperature = row_number(words, row, TEMPERATURE)
    inverse = 1.0 / tl.maximum(temperature, 1e-6)
    index = tl.full([], NONE, tl.int32)
    if not broken:
        truncates = tl.full([], 0, tl.int1)
        top_k = tl.full([], 0, tl.int32)
        top_p = tl.full([], 1.0, tl.float32)
        min_p = tl.full([], 0.0, tl.float32)
        if FULL:
            top_k = row_word(words, row, TOP_K)
            top_p = row_number(words, row, TOP_P)
            min_p = row_number(words, row, MIN_P)
            truncates = (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
        if truncates:
            masses = tl.load(fields + MASS * PARTS, cache_modifier=FRESH)
            total = tl.sum(tl.where(tops > float("-inf"), masses * tl.exp((tops - top) * inverse), 0.0), axis=0)
            cut = tl.max(tl.load(fields + CUT * PARTS, cache_modifier=FRESH), axis=0)
            lane = tl.arange(0, PARTS * WIDTH)
            offered = tl.load(indices + (sample * 2 + 1) * PARTS + lane // WIDTH, cache_modifier=FRESH)
            here = lane % WIDTH < offered
            at = sample * PARTS * WIDTH + lane
            value = tl.load(values + at, mask=here, other=float("-inf"), cache_modifier=FRESH)
            value = tl.where(value >= cut, value, float("-inf"))
            ids = tl.load(candidates + at, mask=here, other=NONE, cache_modifier=FRESH)
            weight = tl.exp((value - top) * inverse)
            known = tl.sum((value > float("-inf")).to(tl.int32), axis=0)
            floor = tl.where(min_p > 0.0, top + tl.log(tl.maximum(min_p, 1e-37)) / inverse, float("-inf"))
            if top_k > 0:
                enough = known >= top_k
            elif top_p < 1.0:
                enough = tl.sum(weight, axis=0) >= top_p * total
            else:
                enough = floor >= cut
            first, second = random_stream(words, row, position)
            row_values = adjusted + sample.to(tl.int64) * vocab
            if enough | (cut == float("-inf")):
                index = truncated(
                    order_key(value), value, weight, ids, row_values, vocab, top, total, top_k, top_p, floor, inverse,
                    first, second, False, BLOCK,
                )  # fmt: skip
            else:
                if (top_k == 0) | (top_p >= 1.0):
                    score, named, named_value, bound = race_of_row(
                        row_values, vocab, floor, top, inverse, first, second, BLOCK // 2
                    )
                    index = first_survivor(
                        score, named, named_value, bound, row_values, vocab, top, total, top_k, top_p, inverse, BLOCK
                    )
                if index == NONE:
                    index = truncated(
                        order_key(value), value, weight, ids, row_values, vocab, top, total, top_k, top_p, floor,
                        inverse, first, second, True, BLOCK,
                    )  # fmt: skip
        else:
            which = tl.load(indices + sample * 2 * PARTS + tl.arange(0, PARTS), cache_modifier=FRESH)
            best = tl.load(fields + BEST * PARTS, cache_modifier=FRESH) + (tops - top) * inverse
            if temperature == 0.0:
                best = tops
            index = tl.min(tl.where(best == tl.max(best, axis=0), which, NONE), axis=0)
    broken |= index >= vocab
    token = tl.where(broken, 0, index)
    tl.store(tokens + sample, tl.where(broken, -1, index))
    if FEEDS:
        tl.store(last_tokens + row, token)
    if not FULL:
        return
    slot = row_word(words, row, PENALTY_SLOT)
    if slot >= 0:
        word = penalties + slot.to(tl.int64) * vocab + token
        tl.store(word, tl.load(word, cache_modifier=FRESH) + 1, mask=index < vocab)
    wanted = row_word(words, row, LOGPROBS)
    if wanted > 0:
        sums = tl.load(fields + RAW_SUM * PARTS, cache_modifier=FRESH)
        sums = tl.where(raw_tops > float("-inf"), sums * tl.exp(raw_tops - raw_top), 0.0)
        log_total = raw_top + tl.log(tl.sum(sums, axis=0))
        raw = tl.load(logits + sample.to(tl.int64) * vocab + token, cache_modifier=FRESH)
        tl.store(logprobs + sample, raw - log_total)
        lane = tl.arange(0, PARTS * 32)
        at = sample * PARTS * 32 + lane
        has = lane % 32 < wanted - 1
        likely = tl.load(top_values + at, mask=has, other=float("-inf"), cache_modifier=FRESH)
        names = tl.load(top_ids + at, mask=has, other=NONE, cache_modifier=FRESH)
        for n in tl.range(0, wanted - 1):
            best = tl.max(likely, axis=0)
            which = tl.min(tl.where(likely == best, names, NONE), axis=0)
            tl.store(out_logprobs + sample * TOP_ROW + n, best - log_total)
            tl.store(out_ids + sample * TOP_ROW + n, tl.where(best > float("-inf"), which, -1))
            likely = tl.where(names == which, float("-inf"), likely)
