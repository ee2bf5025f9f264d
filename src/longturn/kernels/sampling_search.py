"""Truncation of one row for the second sampling kernel: the threshold of top-k and top-p, and who survives it."""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from longturn.kernels.dependent import FRESH
from longturn.kernels.sampling_common import NONE, log_exponential, order_key


@triton.jit
def _above(key, weight, row_values, vocab, threshold, top, inverse, IN_ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Number and weight of the tokens whose key is at least `threshold`: of the candidates, or of the whole row."""
    if IN_ROW:
        number = tl.zeros([BLOCK], dtype=tl.int32)
        mass = tl.zeros([BLOCK], dtype=tl.float32)
        at = tl.arange(0, BLOCK)
        value = tl.load(row_values + at, mask=at < vocab, other=float("-inf"), cache_modifier=FRESH)
        for start in tl.range(BLOCK, vocab + BLOCK, BLOCK, num_stages=1):
            at = start + tl.arange(0, BLOCK)
            ahead = tl.load(row_values + at, mask=at < vocab, other=float("-inf"), cache_modifier=FRESH)
            counted = (order_key(value) >= threshold) & (value > float("-inf"))
            number += counted.to(tl.int32)
            mass += tl.where(counted, tl.exp((value - top) * inverse), 0.0)
            value = ahead
        return tl.sum(number, axis=0), tl.sum(mass, axis=0)
    counted = key >= threshold
    return tl.sum(counted.to(tl.int32), axis=0), tl.sum(tl.where(counted, weight, 0.0), axis=0)


@triton.jit
def _before(row_values, vocab, key_a, id_a, key_b, id_b, top, inverse, BLOCK: tl.constexpr):
    """Number and weight of the tokens of the row that come before token a, and before token b: those likelier, and
    those as likely with a lower id."""
    number_a = tl.zeros([BLOCK], dtype=tl.int32)
    number_b = tl.zeros([BLOCK], dtype=tl.int32)
    mass_a = tl.zeros([BLOCK], dtype=tl.float32)
    mass_b = tl.zeros([BLOCK], dtype=tl.float32)
    at = tl.arange(0, BLOCK)
    value = tl.load(row_values + at, mask=at < vocab, other=float("-inf"), cache_modifier=FRESH)
    for start in tl.range(0, vocab, BLOCK, num_stages=1):
        at = start + BLOCK + tl.arange(0, BLOCK)
        ahead = tl.load(row_values + at, mask=at < vocab, other=float("-inf"), cache_modifier=FRESH)
        key = order_key(value)
        at = start + tl.arange(0, BLOCK)
        weight = tl.exp((value - top) * inverse)
        first = (key > key_a) | ((key == key_a) & (at < id_a))
        number_a += first.to(tl.int32)
        mass_a += tl.where(first, weight, 0.0)
        second = (key > key_b) | ((key == key_b) & (at < id_b))
        number_b += second.to(tl.int32)
        mass_b += tl.where(second, weight, 0.0)
        value = ahead
    return tl.sum(number_a, axis=0), tl.sum(mass_a, axis=0), tl.sum(number_b, axis=0), tl.sum(mass_b, axis=0)


@triton.jit
def race_of_row(row_values, vocab, floor, top, inverse, first, second, BLOCK: tl.constexpr):
    """The race among all tokens of a row of at least `floor`: scores, ids and logits [BLOCK] of the best token of every
    BLOCK-th, and the score above which no other token comes."""
    score = tl.full([BLOCK], float("-inf"), tl.float32)
    others = tl.full([BLOCK], float("-inf"), tl.float32)
    values = tl.full([BLOCK], float("-inf"), tl.float32)
    ids = tl.full([BLOCK], NONE, tl.int32)
    for start in tl.range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(row_values + at, mask=at < vocab, other=float("-inf"), cache_modifier=FRESH)
        new = (value - top) * inverse - log_exponential(at, first, second)
        new = tl.where((value >= floor) & (value > float("-inf")), new, float("-inf"))
        better = new > score
        others = tl.maximum(others, tl.minimum(new, score))
        score = tl.where(better, new, score)
        values = tl.where(better, value, values)
        ids = tl.where(better, at, ids)
    return score, ids, values, tl.max(others, axis=0)


@triton.jit
def _next_racer(score, ids, values):
    """The best of the race: its score, id and key; and the scores without it."""
    best = tl.max(score, axis=0)
    which = tl.min(tl.where(score == best, ids, NONE), axis=0)
    key = order_key(tl.max(tl.where(ids == which, values, float("-inf")), axis=0))
    return best, which, key, tl.where(ids == which, float("-inf"), score)


@triton.jit
def first_survivor(
    score, ids, values, bound, row_values, vocab, top, total, top_k, top_p, inverse, BLOCK: tl.constexpr,
):  # fmt: skip
    """First of the race, in its order, that top-k or top-p (not both) leaves; `NONE` if none of those is found whose
    order is known: scores above `bound`."""
    index = tl.full([], NONE, tl.int32)
    more = tl.full([], 1, tl.int32)
    tries = 0
    while (more != 0) & (tries < 8):
        best_a, id_a, key_a, score = _next_racer(score, ids, values)
        best_b, id_b, key_b, score = _next_racer(score, ids, values)
        lives_a = best_a > bound
        lives_b = best_b > bound
        more = lives_b.to(tl.int32)
        if lives_a & ((top_k > 0) | (top_p < 1.0)):
            number_a, mass_a, number_b, mass_b = _before(
                row_values, vocab, key_a, id_a, key_b, id_b, top, inverse, BLOCK
            )
            lives_a &= ((top_k == 0) | (number_a < top_k)) & ((top_p >= 1.0) | (mass_a < top_p * total))
            lives_b &= ((top_k == 0) | (number_b < top_k)) & ((top_p >= 1.0) | (mass_b < top_p * total))
        index = tl.where(lives_a, id_a, tl.where(lives_b, id_b, index))
        more = tl.where(lives_a | lives_b, 0, more)
        tries += 1
    return index


@triton.jit
def _between(key, ids, row_values, vocab, low, high, limit, IN_ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Number of tokens with low <= key < high and an id of at most `limit`."""
    if IN_ROW:
        number = tl.zeros([BLOCK], dtype=tl.int32)
        for start in tl.range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(row_values + at, mask=at < vocab, other=float("-inf"), cache_modifier=FRESH)
            row_key = order_key(value)
            number += ((row_key >= low) & (row_key < high) & (at <= limit)).to(tl.int32)
        return tl.sum(number, axis=0)
    return tl.sum(((key >= low) & (key < high) & (ids <= limit)).to(tl.int32), axis=0)


@triton.jit
def _search(
    key, weight, row_values, vocab, wanted, low, high, top, inverse,
    BY_COUNT: tl.constexpr, IN_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Shrink [low, high) to the tokens that take number or weight to `wanted`, one token or several with one key.

    Above `high` there is less than wanted. Returns low, high, the number and weight above or at `high`, the number of
    tokens inside, the weight of one of them and how many of them belong to the set (all if even `low` is not enough).
    """
    low_count, low_mass = _above(key, weight, row_values, vocab, low, top, inverse, IN_ROW, BLOCK)
    high_count, high_mass = _above(key, weight, row_values, vocab, high, top, inverse, IN_ROW, BLOCK)
    while (high.to(tl.int64) - low > 1) & (low_count - high_count > 1):
        middle = ((low.to(tl.int64) + high) >> 1).to(tl.int32)
        count, mass = _above(key, weight, row_values, vocab, middle, top, inverse, IN_ROW, BLOCK)
        reached = count >= wanted if BY_COUNT else mass >= wanted
        low = tl.where(reached, middle, low)
        low_count = tl.where(reached, count, low_count)
        low_mass = tl.where(reached, mass, low_mass)
        high = tl.where(reached, high, middle)
        high_count = tl.where(reached, high_count, count)
        high_mass = tl.where(reached, high_mass, mass)
    inside = low_count - high_count
    # Of several tokens with one key, the key tells the weight without the rounding of two large sums.
    shared = (low ^ ((low >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    each = tl.where(inside > 1, tl.exp((shared - top) * inverse), low_mass - high_mass)
    if BY_COUNT:
        taken = wanted - high_count
    else:
        taken = _needed(wanted - high_mass, each, inside)
    return low, high, high_count, high_mass, inside, each, tl.minimum(taken, inside)


@triton.jit
def _needed(missing, each, inside):
    """How many tokens of weight `each` take a sum to `missing`, between 1 and `inside`."""
    needed = tl.ceil(missing / tl.maximum(each, 1e-37))
    return tl.minimum(tl.maximum(needed, 1.0), inside.to(tl.float32)).to(tl.int32)


@triton.jit
def _race(value, ids, key, low, high, limit, floor, top, inverse, first, second):
    """Best score and its id among the survivors of truncation."""
    lives = ((key >= high) | ((key >= low) & (ids <= limit))) & (value >= floor) & (value > float("-inf"))
    score = (value - top) * inverse - log_exponential(ids, first, second)
    score = tl.where(lives, score, float("-inf"))
    best = tl.max(score, axis=0)
    return best, tl.min(tl.where((score == best) & lives, ids, NONE), axis=0)


@triton.jit
def truncated(
    key, value, weight, ids, row_values, vocab, top, total, top_k, top_p, floor, inverse, first, second,
    IN_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Token that wins the race among what top-k, top-p and min-p (logits of at least `floor`) leave."""
    lowest: tl.constexpr = -0x7F800000  # key of values just above -inf, so that banned tokens lie below
    low = tl.full([], lowest, tl.int32)
    end = order_key(top) + 1
    high = low
    limit = tl.full([], NONE, tl.int32)
    inside = tl.full([], 0, tl.int32)
    taken = inside
    mass = total
    if top_k > 0:
        low, high, _, high_mass, inside, each, taken = _search(
            key, weight, row_values, vocab, top_k, low, end, top, inverse, True, IN_ROW, BLOCK
        )
        mass = high_mass + taken.to(tl.float32) * each
        if top_p < 1.0:
            if high_mass < top_p * mass:
                taken = tl.minimum(taken, _needed(top_p * mass - high_mass, each, inside))
            else:
                low, high, _, high_mass, inside, each, taken = _search(
                    key, weight, row_values, vocab, top_p * mass, high, end, top, inverse, False, IN_ROW, BLOCK
                )
    elif top_p < 1.0:
        low, high, _, high_mass, inside, each, taken = _search(
            key, weight, row_values, vocab, top_p * mass, low, end, top, inverse, False, IN_ROW, BLOCK
        )
    if taken < inside:
        # Equal logits: the lowest ids first.
        too_few = tl.full([], -1, tl.int32)
        limit = vocab.to(tl.int32) - 1
        while limit - too_few > 1:
            middle = (limit + too_few) // 2
            enough = _between(key, ids, row_values, vocab, low, high, middle, IN_ROW, BLOCK) >= taken
            limit = tl.where(enough, middle, limit)
            too_few = tl.where(enough, too_few, middle)
    if IN_ROW:
        best = tl.full([], float("-inf"), tl.float32)
        index = tl.full([], NONE, tl.int32)
        for start in tl.range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            here = tl.load(row_values + at, mask=at < vocab, other=float("-inf"), cache_modifier=FRESH)
            score, which = _race(here, at, order_key(here), low, high, limit, floor, top, inverse, first, second)
            index = tl.where(score > best, which, index)
            best = tl.maximum(best, score)
    else:
        best, index = _race(value, ids, key, low, high, limit, floor, top, inverse, first, second)
    return index
