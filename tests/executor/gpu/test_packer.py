"""The host side of the GPU executor against the CPU executor's rows: what a step's pairs make of the device's state."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.config import PAGE_TOKENS
from longturn.engine.records import NewRow, RowWork, SamplingParams, StepPlan, pack_tokens
from longturn.executor.gpu.buckets import Buckets, StepKind, StepShape, at_least
from longturn.executor.gpu.layout import HEADER_WORDS, Part, StateLayout
from longturn.executor.gpu.packer import Packer
from longturn.executor.grammar import Grammars
from longturn.executor.rows import Rows
from longturn.kernels.many_tokens import TILE_TOKENS
from longturn.kernels.sampling_table import MAX_BIASES, MAX_STOPS, PENALTY_SLOT, TEMPERATURE

ROWS, CONTEXT, STEP, VOCAB = 3, 1024, 192, 100
LAYOUT = StateLayout.of(ROWS, CONTEXT, STEP)
GREEDY = SamplingParams(64, temperature=0.0)
WARM = SamplingParams(64, temperature=0.7)
TRUNCATED = SamplingParams(64, temperature=0.7, top_p=0.9)
TOLD = SamplingParams(64, temperature=0.0, logprobs=2)
BOUND = SamplingParams(64, temperature=0.0, grammar="any")


class Compiled:
    """Grammars that are never asked for a mask."""

    def row(self, grammar: object, output: list[int]) -> object:
        return object()


class Device:
    """The state's words, as the scatter kernel and the sampler leave them."""

    def __init__(self, grammars: Grammars | None = None) -> None:
        self.packer = Packer(LAYOUT, Buckets.of(ROWS, STEP, CONTEXT), VOCAB, grammars)
        self.words = np.zeros(LAYOUT.words, np.int32)
        self.buffer = np.zeros(HEADER_WORDS + 2 * LAYOUT.max_pairs, np.int32)

    def step(self, plan: StepPlan) -> StepShape | None:
        packed = self.packed = self.packer.pack(plan, self.buffer)
        pairs = self.buffer[HEADER_WORDS : packed.words].reshape(-1, 2)
        assert len(pairs) == self.buffer[0]
        assert len(set(pairs[:, 0].tolist())) == len(pairs), "a word is written twice, and the scatter has no order"
        self.words[pairs[:, 0]] = pairs[:, 1]
        return packed.shape

    def part(self, name: str, count: int | None = None) -> np.ndarray:
        part = getattr(LAYOUT, name)
        return self.words[part.at : part.at + part.words].reshape(part.rows, part.width)[:count].squeeze(-1)

    def table(self) -> np.ndarray:
        part = LAYOUT.page_table
        return self.words[part.at : part.at + part.words].reshape(part.rows, part.width)

    def sampled(self, row: int, token: int) -> None:
        self.words[LAYOUT.last_token.at + row] = token

    def tokens(self, count: int) -> np.ndarray:
        """Token ids of a step, as `token_ids` resolves them."""
        given, rows = self.part("token", count), self.part("token_row", count)
        return np.where(given < 0, self.words[LAYOUT.last_token.at + rows], given)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_run_gives_the_inputs_that_the_cpu_rows_give(data: st.DataObject) -> None:
    """Random prompts, chunks, decodes, frees and resumes; sampled tokens are random and never pass through the host.

    Some requests want log-probabilities or truncate, some have a grammar: rows that had such a one are then given to
    others.
    """
    draw = data.draw
    device, oracle = Device(grammars=cast(Any, Compiled())), Rows(ROWS, CONTEXT, VOCAB)
    known: dict[int, list[int]] = {}
    ways: dict[int, SamplingParams] = {}
    done: dict[int, int] = {}
    pages: dict[int, int] = {}
    next_page = 1
    for step in range(draw(st.integers(1, 12))):
        freed = tuple(row for row in known if draw(st.integers(0, 5)) == 0)
        for row in freed:
            known.pop(row)
        new_rows, new_pages = [], []
        for row in range(ROWS):
            if row in known or not draw(st.booleans()):
                continue
            known[row] = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=400))
            done[row] = draw(st.integers(0, len(known[row]) - 1)) // PAGE_TOKENS * PAGE_TOKENS
            pages[row] = -(-len(known[row]) // PAGE_TOKENS)
            ids = tuple(range(next_page, next_page + pages[row]))
            next_page += pages[row]
            ways[row] = draw(st.sampled_from([GREEDY, GREEDY, WARM, TRUNCATED, TOLD, BOUND]))
            new_rows.append(NewRow(row, f"{step}.{row}", pack_tokens(known[row]), len(known[row]), ids, ways[row]))
        work: list[RowWork] = []
        budget = STEP
        for row in sorted(known, key=lambda r: (len(known[r]) - done[r] > 1, r)):
            left = len(known[row]) - done[row]
            count = min(left, budget, draw(st.integers(1, STEP)))
            if count == 0 or done[row] + count > CONTEXT - 1:
                continue
            if done[row] + count > pages[row] * PAGE_TOKENS:
                new_pages.append((row, (next_page,)))
                next_page, pages[row] = next_page + 1, pages[row] + 1
            work.append(RowWork(row, done[row], count, count == left))
            budget -= count
            done[row] += count
        plan = StepPlan(step, tuple(work), tuple(new_rows), tuple(new_pages), freed)
        shape = device.step(plan)
        oracle.apply(plan)
        np.testing.assert_array_equal(
            device.table()[:, : oracle.page_tables.shape[1]] * _held(oracle), oracle.page_tables
        )
        if not work:
            assert shape is None
            continue
        assert shape is not None
        inputs = oracle.inputs(plan.work)
        total = len(inputs.tokens)
        assert shape.tokens >= total and shape.blocks * PAGE_TOKENS > inputs.positions.max()
        np.testing.assert_array_equal(device.tokens(total), inputs.tokens)
        positions = device.part("position", shape.tokens)
        np.testing.assert_array_equal(positions[:total], inputs.positions)
        assert (positions[total:] == -1).all()
        samples = [w for w in work if w.samples]
        assert [row for row, _ in device.packed.samples] == [w.row for w in samples]
        assert device.packed.plain == all(ways[w.row] is not TOLD for w in samples)
        assert device.packed.grammars == any(ways[w.row] is BOUND for w in samples)
        assert device.packed.light == all(ways[w.row] in (GREEDY, WARM) for w in samples)
        np.testing.assert_array_equal(device.part("sample_row")[: len(samples)], [w.row for w in samples])
        np.testing.assert_array_equal(device.part("sample_index")[: len(samples)], inputs.sample_index)
        np.testing.assert_array_equal(
            device.part("sample_position")[: len(samples)], [w.start + w.count for w in samples]
        )
        size = shape.tokens if shape.kind is StepKind.DECODE else ROWS
        assert (device.part("sample_row")[len(samples) : size] == -1).all()
        if shape.kind is StepKind.MANY:
            _check_tiles(device, shape, inputs.query_starts)
        else:
            assert all(w.count == 1 and w.samples for w in work)
        for w in samples:
            token = draw(st.integers(0, VOCAB - 1))
            known[w.row].append(token)
            oracle.append(w.row, token)
            device.sampled(w.row, token)


def _held(oracle: Rows) -> np.ndarray:
    """1 where a row's page table is in use: rows that were freed may keep old entries on the device."""
    return (oracle.page_tables > 0).astype(np.int32)


def _check_tiles(device: Device, shape: StepShape, query_starts: np.ndarray) -> None:
    part = LAYOUT.tiles
    tiles = device.words[part.at : part.at + part.words].reshape(-1, 2)
    used = tiles[tiles[:, 1] > 0]
    assert (tiles[: len(used), 1] > 0).all(), "padding comes last"
    assert (used[:, 1] <= TILE_TOKENS).all()
    covered = np.concatenate([np.arange(first, first + count) for first, count in used])
    np.testing.assert_array_equal(covered, np.arange(query_starts[-1]))
    ends = {int(first + count) for first, count in used}
    assert {int(start) for start in query_starts[1:]} <= ends, "a tile holds tokens of one row"


def test_a_new_rows_table_is_zero_past_its_pages() -> None:
    device = Device()
    device.step(StepPlan(1, (), (NewRow(1, "a", pack_tokens([5] * 600), 600, (7, 8, 9, 10, 11), GREEDY),)))
    device.step(StepPlan(2, (), (NewRow(1, "b", pack_tokens([5]), 1, (3,), GREEDY),), ((1, (4,)),), freed_rows=(1,)))
    assert device.table()[1, :6].tolist() == [3, 4, 0, 0, 0, 0]
    # Pages that came later are cleared too.
    device.step(StepPlan(3, (), (), ((1, (5, 6, 8)),)))
    assert device.table()[1, :6].tolist() == [3, 4, 5, 6, 8, 0]
    device.step(StepPlan(4, (), (NewRow(1, "c", pack_tokens([5]), 1, (9,), GREEDY),), freed_rows=(1,)))
    assert device.table()[1, :6].tolist() == [9, 0, 0, 0, 0, 0]


def test_padding_of_a_decode_step_names_no_row_and_no_token() -> None:
    layout = StateLayout.of(8, CONTEXT, STEP)
    packer, buffer = Packer(layout, Buckets.of(8, STEP, CONTEXT), VOCAB), np.zeros(4096, np.int32)
    new = tuple(NewRow(n, str(n), pack_tokens([7]), 1, (n + 1,), GREEDY) for n in range(3))
    packed = packer.pack(StepPlan(1, tuple(RowWork(n, 0, 1, True) for n in range(3)), new), buffer)
    found = dict(buffer[HEADER_WORDS : packed.words].reshape(-1, 2).tolist())
    assert packed.shape == StepShape(StepKind.DECODE, 4, 16)
    names = ("token", "position", "token_row", "sample_row", "sample_position", "sample_index")
    assert [found[getattr(layout, name).at + 2] for name in names] == [7, 0, 2, 2, 1, 2]
    assert [found[getattr(layout, name).at + 3] for name in names] == [0, -1, 0, -1, -1, 3]


def test_a_step_that_ends_with_a_page_needs_no_further_block() -> None:
    layout = StateLayout.of(1, 128 * PAGE_TOKENS + PAGE_TOKENS, 128)
    packer = Packer(layout, Buckets(batches=(1,), tokens=(128,), blocks=(1, 2, 144)), VOCAB)
    buffer = np.zeros(HEADER_WORDS + 2 * layout.max_pairs, np.int32)
    row = NewRow(0, "a", pack_tokens([1] * 128), 128, (1, 2), GREEDY)
    packed = packer.pack(StepPlan(1, (RowWork(0, 0, 128, True),), (row,)), buffer)
    assert packed.shape == StepShape(StepKind.MANY, 128, 1)
    packed = packer.pack(StepPlan(2, (RowWork(0, 128, 1, True),)), buffer)
    assert packed.shape == StepShape(StepKind.DECODE, 1, 2)


def test_the_longest_row_of_a_decode_step_tells_its_blocks() -> None:
    layout = StateLayout.of(2, 144 * PAGE_TOKENS, 128)
    packer = Packer(layout, Buckets(batches=(2,), tokens=(128,), blocks=(1, 2, 144)), VOCAB)
    buffer = np.zeros(HEADER_WORDS + 2 * layout.max_pairs, np.int32)
    counts = (1, 257)
    rows = tuple(NewRow(n, str(n), pack_tokens([1] * counts[n]), counts[n], (1, 2, 3), GREEDY) for n in range(2))
    work = (RowWork(0, 0, 1, True), RowWork(1, 256, 1, True))
    assert packer.pack(StepPlan(1, work, rows), buffer).shape == StepShape(StepKind.DECODE, 2, 144)


def test_a_row_that_waits_keeps_the_token_it_was_given() -> None:
    """Another one is decoded meanwhile; from then on both go on from what they sampled."""
    device = Device()
    rows = tuple(NewRow(n, str(n), pack_tokens([40 + n]), 1, (n + 1,), GREEDY) for n in range(2))
    for step, (work, tokens) in enumerate(
        [([(0, 0)], [40]), ([(0, 1)], [70]), ([(1, 0), (0, 2)], [41, 70]), ([(1, 1), (0, 3)], [71, 70])]
    ):
        plan = StepPlan(step, tuple(RowWork(row, start, 1, True) for row, start in work), rows if step == 0 else ())
        device.step(plan)
        assert device.tokens(len(work)).tolist() == tokens
        for row, _ in work:
            device.sampled(row, 70 + row)


def test_parts_of_the_state_are_aligned_and_apart() -> None:
    layout = StateLayout.of(5, 3000, 333)
    parts = [getattr(layout, name) for name in layout.__slots__]
    parts = [part for part in parts if isinstance(part, Part)]
    assert len(parts) == 13
    end = 0
    for part in parts:
        assert part.at >= end and part.at % 32 == 0
        end = part.at + part.words
    assert end <= layout.words < end + 32


def test_the_fullest_step_fits_to_the_word() -> None:
    """Every row new with all that it can hold, and a step of all tokens in which every row is sampled."""
    rows, context, tokens = 3, 16 * PAGE_TOKENS, 192
    layout = StateLayout.of(rows, context, tokens)
    packer = Packer(layout, Buckets.of(rows, tokens, context), 2 * MAX_BIASES)
    buffer = np.zeros(HEADER_WORDS + 2 * layout.max_pairs, np.int32)
    counts = (1, 1, tokens - 2)
    full = SamplingParams(
        4,
        min_tokens=2,
        stop_token_ids=tuple(range(MAX_STOPS)),
        logit_bias=tuple((n, 1.0) for n in range(MAX_BIASES)),
    )
    new = tuple(
        NewRow(n, str(n), pack_tokens([5] * count), count, tuple(range(16 * n + 1, 16 * n + 17)), full)
        for n, count in enumerate(counts)
    )
    work = tuple(RowWork(n, 0, count, True) for n, count in enumerate(counts))
    packed = packer.pack(StepPlan(1, work, new), buffer)
    assert packed.words == len(buffer)
    places = buffer[HEADER_WORDS:].reshape(-1, 2)[:, 0]
    assert len(set(places.tolist())) == layout.max_pairs


def test_what_is_wanted_back_is_the_most_that_any_sample_wants() -> None:
    device = Device()
    rows = tuple(NewRow(n, str(n), pack_tokens([1]), 1, (n + 1,), TOLD if n == 0 else GREEDY) for n in range(2))
    packed = device.packer.pack(StepPlan(1, tuple(RowWork(n, 0, 1, True) for n in range(2)), rows), device.buffer)
    assert not packed.plain and not packed.grammars
    assert device.packer.pack(StepPlan(2, (RowWork(1, 1, 1, True),)), device.buffer).plain


def test_sampling_words_follow_the_row() -> None:
    device = Device()
    wild = SamplingParams(4, temperature=0.5, frequency_penalty=1.0)
    plan = StepPlan(1, (), (NewRow(2, "a", pack_tokens([1, 2]), 1, (1,), wild),))
    packed = device.packer.pack(plan, device.buffer)
    device.step(plan)
    words = device.words[LAYOUT.sampling.row(2) : LAYOUT.sampling.row(3)]
    assert words[[TEMPERATURE]].view(np.float32)[0] == 0.5 and words[PENALTY_SLOT] == 2
    ((row, counts),) = packed.penalties
    assert row == 2 and len(counts) == VOCAB and counts[2] == 1


def test_what_the_device_cannot_sample_fails_alone() -> None:
    device = Device()
    many = SamplingParams(4, logit_bias=tuple((i, 1.0) for i in range(2000)))
    work = (RowWork(0, 0, 1, True), RowWork(1, 0, 1, True))
    rows = (NewRow(0, "a", pack_tokens([1]), 1, (1,), many), NewRow(1, "b", pack_tokens([1]), 1, (2,), GREEDY))
    packed = device.packer.pack(StepPlan(1, work, rows), device.buffer)
    (_, bad), (_, good) = packed.samples
    assert bad.error is not None and "logit_bias" in bad.error and good.error is None
    assert not packed.plain


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (RowWork(0, 3, 1, True), "row 0 has 2 tokens; the plan wants positions 3..3"),
        (RowWork(0, 1, 3, True), "row 0 has 2 tokens; the plan wants positions 1..3"),
        (RowWork(1, 0, 1, True), "row 1 is not in use"),
        (RowWork(1, 0, 2, False), "row 1 is not in use"),
    ],
)
def test_work_that_cannot_be_is_named(work: RowWork, words: str) -> None:
    device = Device()
    device.step(StepPlan(1, (), (NewRow(0, "a", pack_tokens([1, 2]), 2, (1,), GREEDY),)))
    with pytest.raises(ValueError, match=words):
        device.step(StepPlan(2, (work,)))


@pytest.mark.parametrize(("start", "count"), [(0, 130), (129, 1)])
def test_pages_that_a_row_lacks_are_named(start: int, count: int) -> None:
    device = Device()
    device.step(StepPlan(1, (), (NewRow(0, "a", pack_tokens([1] * 130), 130, (1,), GREEDY),)))
    with pytest.raises(ValueError, match="row 0 has pages up to position 128; the plan wants position 129"):
        device.step(StepPlan(2, (RowWork(0, start, count, True),)))


@given(st.integers(1, 64), st.integers(1, 9000), st.integers(1, 1 << 20))
def test_buckets_hold_whatever_fits(rows: int, tokens: int, context: int) -> None:
    buckets = Buckets.of(rows, max(tokens, rows), context)
    pages = -(-context // (16 * PAGE_TOKENS)) * 16
    for sizes, most in ((buckets.batches, rows), (buckets.tokens, max(tokens, rows)), (buckets.blocks, pages)):
        assert list(sizes) == sorted(set(sizes)) and sizes[-1] == most
    assert buckets.many(tokens, pages).tokens >= tokens
    shape = buckets.decode(rows, 1)
    assert shape is not None and shape.tokens >= rows
    with pytest.raises(ValueError, match="over the largest size"):
        at_least(buckets.blocks, pages + 1)


def test_a_grammar_anywhere_among_the_samples_is_told() -> None:
    packer = Packer(LAYOUT, Buckets.of(ROWS, STEP, CONTEXT), VOCAB, cast(Any, Compiled()))
    buffer = np.zeros(HEADER_WORDS + 2 * LAYOUT.max_pairs, np.int32)
    rows = tuple(NewRow(n, str(n), pack_tokens([1]), 1, (n + 1,), BOUND if n == 0 else GREEDY) for n in range(2))
    assert packer.pack(StepPlan(1, tuple(RowWork(n, 0, 1, True) for n in range(2)), rows), buffer).grammars
    assert not packer.pack(StepPlan(2, (RowWork(1, 1, 1, True),)), buffer).grammars
