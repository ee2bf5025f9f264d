"""From a plan to the words of the device's state that change: the executor's host side, in numpy.

The host knows every position and every page in advance; of token ids it knows those that plans brought. A token that a
row sampled itself is written as -1, and the device puts in what it sampled last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longturn.config import PAGE_TOKENS
from longturn.engine.records import NewRow, RowWork, StepPlan
from longturn.executor.gpu.buckets import Buckets, StepShape
from longturn.executor.gpu.layout import HEADER_WORDS, StateLayout
from longturn.executor.gpu.sampling import RowSampling
from longturn.executor.grammar import Grammars
from longturn.kernels.many_tokens import TILE_TOKENS

Int32 = npt.NDArray[np.int32]

LAST_SAMPLED = -1
"""Stands for the last token that the row sampled."""


@dataclass(slots=True)
class _Row:
    """What the host knows of a row in use."""

    tokens: Int32
    """Ids that plans brought; positions after them hold sampled tokens."""
    given: int
    """How many those are."""
    known: int
    """Tokens given or sampled, counting those of launched steps."""
    pages: int
    page_end: int
    """Positions that the pages hold."""
    sampling: RowSampling


class PackedStep(NamedTuple):
    """What was written, and how the step runs."""

    words: int
    """Of the buffer, from its start."""
    shape: StepShape | None
    """None if the plan has no work."""
    samples: list[tuple[int, RowSampling]]
    """Rows sampled, in the order of their samples, padding apart."""
    plain: bool
    """Of all samples only the token is wanted back."""
    penalties: list[tuple[int, Int32]]
    """New contents of penalty slots, which are too long for pairs."""
    grammars: bool = False
    """Some sample follows a grammar."""


class Packer:
    """Applies plans in the order of their launch. Not thread-safe."""

    def __init__(
        self, layout: StateLayout, buckets: Buckets, vocab_size: int, grammars: Grammars | None = None
    ) -> None:
        """`grammars`: for requests that bring one; such a request fails if None."""
        self._grammars = grammars
        self._layout = layout
        self._vocab_size = vocab_size
        self._buckets = buckets
        self._rows: list[_Row | None] = [None] * layout.rows
        self._decode_places: dict[int, Int32] = {}
        """Of a decode step of so many slots: the words that its inputs go to."""
        self._filled = [0] * layout.rows
        """Entries of each row's page table that are not 0 on the device."""

    def pack(self, plan: StepPlan, buffer: Int32) -> PackedStep:
        """Write the plan's differences and inputs as pairs.

        Args:
            buffer: at least HEADER_WORDS + 2 * layout.max_pairs words; overwritten.

        Raises:
            ValueError: work refers to a token that is neither given nor sampled, or to a page the row does not have.
        """
        pairs = _Pairs(buffer)
        penalties = self._apply(plan, pairs)
        work = plan.work
        if not work:
            return PackedStep(pairs.finish(), None, [], True, penalties)
        # One pass over the items: a decode step of many rows spends most of its host time here.
        rows = self._rows
        numbers: list[int] = []
        starts: list[int] = []
        tokens: list[int] = []
        samples: list[tuple[int, RowSampling]] = []
        end = total = 0
        single = plain = True
        grammars = False
        for w in work:
            number, start, count = w.row, w.start, w.count
            row = rows[number]
            stop = start + count
            if row is None or stop > row.known or stop > row.page_end:
                raise ValueError(self._complaint(w))
            end = max(end, stop)
            total += count
            single = single and count == 1 and w.samples
            numbers.append(number)
            starts.append(start)
            tokens.append(int(row.tokens[start]) if start < row.given else LAST_SAMPLED)
            if w.samples:
                row.known += 1
                samples.append((number, row.sampling))
                plain = plain and row.sampling.plain
                grammars = grammars or row.sampling.grammar is not None
        blocks = (end - 1) // PAGE_TOKENS + 1
        shape = self._buckets.decode(len(work), blocks) if single else None
        if shape is None:
            shape = self._buckets.many(total, blocks)
            self._many(work, shape, pairs)
        else:
            self._decode(numbers, starts, tokens, shape, pairs)
        return PackedStep(pairs.finish(), shape, samples, plain, penalties, grammars)

    def differences(self, plan: StepPlan, buffer: Int32) -> PackedStep:
        """As `pack`, but the plan's work counts as done elsewhere: only the differences are written."""
        pairs = _Pairs(buffer)
        penalties = self._apply(plan, pairs)
        for w in plan.work:
            self._of(w.row).known += w.samples
        return PackedStep(pairs.finish(), None, [], True, penalties)

    # --- differences ------------------------------------------------------------------------------------------------

    def _apply(self, plan: StepPlan, pairs: _Pairs) -> list[tuple[int, Int32]]:
        """Free rows, fill new ones, append pages. Destinations of one step must differ: the scatter has no order."""
        penalties = []
        for row in plan.freed_rows:
            self._rows[row] = None
        table = self._layout.page_table
        appended = dict(plan.new_pages)
        for new in plan.new_rows:
            sampling = self._new_row(new, appended.pop(new.row, ()), pairs)
            if sampling.penalties is not None:
                penalties.append((new.row, sampling.penalties))
        for row, pages in appended.items():
            state = self._of(row)
            pairs.put(table.row(row) + state.pages, np.array(pages, np.int32))
            state.pages += len(pages)
            state.page_end = state.pages * PAGE_TOKENS
            self._filled[row] = max(self._filled[row], state.pages)
        return penalties

    def _new_row(self, new: NewRow, appended: tuple[int, ...], pairs: _Pairs) -> RowSampling:
        layout = self._layout
        tokens = np.frombuffer(new.tokens, "<i4").astype(np.int32, copy=False)
        pages = (*new.pages, *appended)
        if len(pages) > layout.page_table.width:
            raise ValueError(f"row {new.row} is given {len(pages)} pages of at most {layout.page_table.width}")
        entries = np.zeros(max(len(pages), self._filled[new.row]), np.int32)
        entries[: len(pages)] = pages
        pairs.put(layout.page_table.row(new.row), entries)
        self._filled[new.row] = len(pages)
        sampling = RowSampling.of(new.row, new.sampling, tokens, new.prompt_tokens, self._vocab_size, self._grammars)
        words = sampling.words
        pairs.put(layout.sampling.row(new.row), np.array(words.params, np.int32))
        pairs.put(layout.stop_ids.row(new.row), np.array(words.stop_ids, np.int32))
        pairs.put(layout.bias_ids.row(new.row), np.array(words.bias_ids, np.int32))
        pairs.put(layout.bias_values.row(new.row), np.array(words.bias_values, np.float32).view(np.int32))
        self._rows[new.row] = _Row(tokens, len(tokens), len(tokens), len(pages), len(pages) * PAGE_TOKENS, sampling)
        return sampling

    def _of(self, row: int) -> _Row:
        state = self._rows[row]
        if state is None:
            raise ValueError(f"row {row} is not in use")
        return state

    def _complaint(self, w: RowWork) -> str:
        row, end = self._rows[w.row], w.start + w.count
        if row is None:
            return f"row {w.row} is not in use"
        if end > row.known:
            return f"row {w.row} has {row.known} tokens; the plan wants positions {w.start}..{end - 1}"
        return f"row {w.row} has pages up to position {row.page_end}; the plan wants position {end - 1}"

    # --- inputs -----------------------------------------------------------------------------------------------------

    def _decode(self, rows: list[int], starts: list[int], tokens: list[int], shape: StepShape, pairs: _Pairs) -> None:
        """Slot i is work item i, and is sampled after."""
        size, count = shape.tokens, len(rows)
        places = self._decode_places.get(size)
        if places is None:
            layout = self._layout
            parts = (
                layout.token, layout.position, layout.token_row,
                layout.sample_row, layout.sample_position, layout.sample_index,
            )  # fmt: skip
            places = np.concatenate([np.arange(part.at, part.at + size, dtype=np.int32) for part in parts])
            self._decode_places[size] = places
        values = np.full((6, size), -1, np.int32)
        values[:4, :count] = (tokens, starts, rows, rows)
        values[4, :count] = values[1, :count] + 1
        values[0, count:] = values[2, count:] = 0
        values[5] = np.arange(size, dtype=np.int32)
        pairs.put_at(places, values.ravel())

    def _many(self, work: tuple[RowWork, ...], shape: StepShape, pairs: _Pairs) -> None:
        layout, size = self._layout, shape.tokens
        token, row = np.zeros(size, np.int32), np.zeros(size, np.int32)
        position = np.full(size, -1, np.int32)
        tiles: list[tuple[int, int]] = []
        samples: list[tuple[int, int, int]] = []
        at = 0
        for w in work:
            end = at + w.count
            given = self._of(w.row).tokens[w.start : w.start + w.count]
            token[at : at + len(given)] = given
            token[at + len(given) : end] = LAST_SAMPLED
            position[at:end] = np.arange(w.start, w.start + w.count, dtype=np.int32)
            row[at:end] = w.row
            tiles.extend((first, min(TILE_TOKENS, end - first)) for first in range(at, end, TILE_TOKENS))
            if w.samples:
                samples.append((end - 1, w.row, w.start + w.count))
            at = end
        pairs.put(layout.token.at, token)
        pairs.put(layout.position.at, position)
        pairs.put(layout.token_row.at, row)
        pairs.put(layout.tiles.at, _padded(tiles, many_tiles(shape.tokens, layout), 0))
        picked = _padded([s[:1] for s in samples], layout.max_samples, 0)
        pairs.put(layout.sample_index.at, picked)
        for part, column in ((layout.sample_row, 1), (layout.sample_position, 2)):
            pairs.put(part.at, _padded([s[column : column + 1] for s in samples], layout.max_samples, -1))


def many_tiles(tokens: int, layout: StateLayout) -> int:
    """Tiles of a step of `tokens` tokens in any split among the rows."""
    return -(-tokens // TILE_TOKENS) + min(layout.rows, tokens)


def _padded(rows: Sequence[tuple[int, ...]], count: int, fill: int) -> Int32:
    """`rows` and then `fill` up to `count` rows, flat."""
    width = len(rows[0]) if rows else 1
    out = np.full((count, width), fill, np.int32)
    if rows:
        out[: len(rows)] = rows
    return out.ravel()


@dataclass(slots=True)
class _Pairs:
    """Writes (word, value) pairs behind the header."""

    buffer: Int32
    count: int = 0
    _view: Int32 = field(init=False)

    def __post_init__(self) -> None:
        words = (len(self.buffer) - HEADER_WORDS) // 2 * 2
        self._view = self.buffer[HEADER_WORDS : HEADER_WORDS + words].reshape(-1, 2)

    def put(self, at: int, values: Int32) -> None:
        """values[i] goes to word at + i."""
        self.put_at(np.arange(at, at + len(values), dtype=np.int32), values)

    def put_at(self, places: Int32, values: Int32) -> None:
        """values[i] goes to word places[i]."""
        end = self.count + len(values)
        self._view[self.count : end, 0] = places
        self._view[self.count : end, 1] = values
        self.count = end

    def finish(self) -> int:
        """Write the header; the words in use."""
        self.buffer[0] = self.count
        return HEADER_WORDS + 2 * self.count
