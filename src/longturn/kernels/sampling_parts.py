"""The first sampling kernel: each program reads a part of a row's vocabulary once, and keeps what `finish` may need."""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from longturn.kernels.dependent import FRESH, wait_then_release
from longturn.kernels.sampling_common import (
    BEST,
    BIAS_ROW,
    BIASES,
    COUNT_BITS,
    CUT,
    FIELDS,
    FREQUENCY,
    LOGPROBS,
    MASS,
    MIN_P,
    NONE,
    PENALTY_SLOT,
    PRESENCE,
    RAW_SUM,
    RAW_TOP,
    REPETITION,
    RUN,
    STOP_FROM,
    STOP_ROW,
    STOPS,
    TEMPERATURE,
    TOP,
    TOP_K,
    TOP_P,
    log_exponential,
    random_stream,
    row_number,
    row_word,
)


@triton.jit
def _adjust(
    value, ids, ok, sample, row, position, part, words, stop_ids, bias_ids, bias_values, penalties, bitmask, vocab,
    bitmask_words, PARTS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Penalties, bias, the ban on stop tokens and the grammar, on a part's logits."""
    slot = row_word(words, row, PENALTY_SLOT)
    if slot >= 0:
        word = tl.load(penalties + slot.to(tl.int64) * vocab + ids, mask=ok, other=0, cache_modifier=FRESH)
        count = word & COUNT_BITS
        repetition = row_number(words, row, REPETITION)
        value = tl.where(word != 0, tl.where(value > 0, value / repetition, value * repetition), value)
        value -= row_number(words, row, FREQUENCY) * count.to(tl.float32)
        value -= tl.where(count > 0, row_number(words, row, PRESENCE), 0.0)
    biases = row_word(words, row, BIASES)
    if biases > 0:
        entry = tl.arange(0, BIAS_ROW)
        here = entry < biases
        biased = tl.load(bias_ids + row * BIAS_ROW + entry, mask=here, other=0, cache_modifier=FRESH)
        bias = tl.load(bias_values + row * BIAS_ROW + entry, mask=here, other=0.0, cache_modifier=FRESH)
        # One after the other, but this part's alone: about one in PARTS.
        here &= (biased // RUN) % PARTS == part
        for _ in tl.range(0, tl.sum(here.to(tl.int32), axis=0)):
            first = tl.min(tl.where(here, entry, NONE), axis=0)
            which = tl.sum(tl.where(entry == first, biased, 0), axis=0)
            value += tl.where(ids == which, tl.sum(tl.where(entry == first, bias, 0.0), axis=0), 0.0)
            here &= entry != first
    if position < row_word(words, row, STOP_FROM):
        for i in tl.range(0, row_word(words, row, STOPS)):
            value = tl.where(ids == tl.load(stop_ids + row * STOP_ROW + i, cache_modifier=FRESH), float("-inf"), value)
    if MASKED:
        allowed = tl.load(bitmask + sample * bitmask_words + ids // 32, mask=ok, other=0, cache_modifier=FRESH)
        value = tl.where((allowed >> (ids % 32)) & 1 != 0, value, float("-inf"))
    return tl.where(value == value, value, float("-inf"))


@triton.jit
def sample_parts(
    logits, rows, positions, words, stop_ids, bias_ids, bias_values, penalties, bitmask, vocab, bitmask_words,
    floats, indices, values, candidates, adjusted, top_values, top_ids,
    PARTS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
    FULL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What one part of the vocabulary has to offer for a sample, into the buffers of `SampleScratch`.

    logits fp32 [S, vocab]; rows, positions int32 [S], row -1 for padding; bitmask int32 [S, bitmask_words] with a bit a
    token; words, stop_ids, bias_ids, bias_values and penalties are a `SamplingTable`. Without FULL only greedy rows and
    plain draws are right. The grid is (PARTS, S).
    """
    part = tl.program_id(0)
    sample = tl.program_id(1)
    wait_then_release(PDL)
    row = tl.load(rows + sample, cache_modifier=FRESH)
    if row < 0:
        return
    position = tl.load(positions + sample, cache_modifier=FRESH)
    lane = tl.arange(0, TILE)
    ids = ((lane // RUN) * PARTS + part) * RUN + lane % RUN
    ok = ids < vocab
    at = sample.to(tl.int64) * vocab + ids
    raw = tl.load(logits + at, mask=ok, other=float("-inf"), cache_modifier=FRESH)
    if FULL:
        value = _adjust(
            raw, ids, ok, sample, row, position, part, words, stop_ids, bias_ids, bias_values, penalties, bitmask,
            vocab, bitmask_words, PARTS, MASKED,
        )  # fmt: skip
    else:
        value = tl.where(raw == raw, raw, float("-inf"))
    top = tl.max(value, axis=0)
    temperature = row_number(words, row, TEMPERATURE)
    inverse = 1.0 / tl.maximum(temperature, 1e-6)
    relative = (value - tl.where(top == float("-inf"), 0.0, top)) * inverse
    truncates = tl.full([], 0, tl.int1)
    if FULL:
        truncates = (row_word(words, row, TOP_K) > 0) | (row_number(words, row, TOP_P) < 1.0)
        truncates = (truncates | (row_number(words, row, MIN_P) > 0.0)) & (temperature > 0.0)
    fields = floats + sample * FIELDS * PARTS + part
    counts = indices + sample * 2 * PARTS + part
    if truncates:
        tl.store(adjusted + at, value, mask=ok)
        tl.store(fields + MASS * PARTS, tl.sum(tl.exp(relative), axis=0))
        # Offer at most WIDTH tokens: all those above a cut that comes closer to the top until they are few enough.
        few = tl.sum((value > float("-inf")).to(tl.int32), axis=0) <= WIDTH
        cut = tl.where(few, float("-inf"), top)
        count = tl.where(few, 0, WIDTH + 1)
        reach = 12.0 / inverse
        tries = 0
        while (count > WIDTH) & (tries < 16):
            cut = top - reach
            count = tl.sum((value >= cut).to(tl.int32), axis=0)
            reach *= 0.7
            tries += 1
        if count > WIDTH:
            cut = tl.full([], float("inf"), tl.float32)
        keep = (value >= cut) & (value > float("-inf"))
        slot = tl.cumsum(keep.to(tl.int32), axis=0) - 1
        to = (sample * PARTS + part) * WIDTH + slot
        tl.store(values + to, value, mask=keep)
        tl.store(candidates + to, ids, mask=keep)
        tl.store(fields + CUT * PARTS, cut)
        tl.store(counts + PARTS, tl.sum(keep.to(tl.int32), axis=0))
    else:
        score = relative
        if temperature > 0.0:
            low, high = random_stream(words, row, position)
            score = relative - log_exponential(ids, low, high)
        best = tl.max(score, axis=0)
        tl.store(fields + BEST * PARTS, best)
        tl.store(counts, tl.min(tl.where((score == best) & ok, ids, NONE), axis=0))
    tl.store(fields + TOP * PARTS, top)
    broken = tl.max((raw != raw).to(tl.int32), axis=0) != 0
    raw_top = tl.max(tl.where(raw == raw, raw, float("-inf")), axis=0)
    tl.store(fields + RAW_TOP * PARTS, tl.where(broken, float("nan"), raw_top))
    if not FULL:
        return
    wanted = row_word(words, row, LOGPROBS)
    if wanted > 0:
        base = tl.where(raw_top == float("-inf"), 0.0, raw_top)
        tl.store(fields + RAW_SUM * PARTS, tl.sum(tl.exp(raw - base), axis=0))
        for n in tl.range(0, wanted - 1):
            best = tl.max(raw, axis=0)
            which = tl.min(tl.where(raw == best, ids, NONE), axis=0)
            tl.store(top_values + (sample * PARTS + part) * 32 + n, best)
            tl.store(top_ids + (sample * PARTS + part) * 32 + n, which)
            raw = tl.where(ids == which, float("-inf"), raw)
