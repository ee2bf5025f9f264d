"""From a plan to the words of the device's state that change: the executor's host side, in numpy.

The host knows every position and every page in advance; of token ids it knows those that plans brought. A token that a
row sampled itself is written as -1, and the device puts in what it sampled last.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longturn.config import PAGE_TOKENS
from longturn.engine.records import NewRow, RowWork, StepPlan
from longturn.executor.gpu.buckets import Buckets, StepShape
from longturn.executor.gpu.layout import StateLayout
from longturn.executor.gpu.pairs import Pairs, Template
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
    sample: tuple[int, RowSampling]
    """The row's number, and how it samples."""


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
    light: bool = True
    """A temperature is all that any sample needs."""


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
        self._unread: set[int] = set()
        """Rows that may have given tokens left to compute."""
        self._telling: set[int] = set()
        """Rows in use that want more than tokens back."""
        self._bound: set[int] = set()
        """Rows in use with a grammar."""
        self._heavy: set[int] = set()
        """Rows in use that sample with more than a temperature."""
        self._padding: dict[int, Template] = {}
        """Inputs of a decode step of so many slots, all of them padding."""
        self._filled = [0] * layout.rows
        """Entries of each row's page table that are not 0 on the device."""

    def pack(self, plan: StepPlan, buffer: Int32) -> PackedStep:
        """Write the plan's differences and inputs as pairs.

        Args:
            buffer: at least HEADER_WORDS + 2 * layout.max_pairs words; overwritten.

        Raises:
            ValueError: work refers to a token that is neither given nor sampled, or to a page the row does not have.
        """
        pairs = Pairs(buffer)
        penalties = self._apply(plan, pairs)
        work = plan.work
        if not work:
            return PackedStep(pairs.finish(), None, [], True, penalties)
        rows = [w.row for w in work]
        sampled = [w.samples for w in work]
        if len(rows) <= self._buckets.batches[-1] and all(sampled) and sum([w.count for w in work]) == len(rows):
            shape, samples = self._decode(rows, [w.start for w in work], pairs)
        else:
            shape, samples = self._many(work, pairs)
            rows = list(compress(rows, sampled))
        plain, grammars = not _meets(self._telling, rows), _meets(self._bound, rows)
        light = not _meets(self._heavy, rows)
        return PackedStep(pairs.finish(), shape, samples, plain, penalties, grammars, light)

    def differences(self, plan: StepPlan, buffer: Int32) -> PackedStep:
        """As `pack`, but the plan's work counts as done elsewhere: only the differences are written."""
        pairs = Pairs(buffer)
        penalties = self._apply(plan, pairs)
        for w in plan.work:
            self._of(w.row).known += w.samples
        return PackedStep(pairs.finish(), None, [], True, penalties)

    # --- differences ------------------------------------------------------------------------------------------------

    def _apply(self, plan: StepPlan, pairs: Pairs) -> list[tuple[int, Int32]]:
        """Free rows, fill new ones, append pages. Destinations of one step must differ: the scatter has no order."""
        penalties = []
        for row in plan.freed_rows:
            self._rows[row] = None
            for rows in (self._unread, self._telling, self._bound, self._heavy):
                rows.discard(row)
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

    def _new_row(self, new: NewRow, appended: tuple[int, ...], pairs: Pairs) -> RowSampling:
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
        page_end, sample = len(pages) * PAGE_TOKENS, (new.row, sampling)
        self._rows[new.row] = _Row(tokens, len(tokens), len(tokens), len(pages), page_end, sample)
        self._unread.add(new.row)
        if not sampling.plain:
            self._telling.add(new.row)
        if sampling.grammar is not None:
            self._bound.add(new.row)
        if not sampling.light:
            self._heavy.add(new.row)
        return sampling

    def _of(self, row: int) -> _Row:
        state = self._rows[row]
        if state is None:
            raise ValueError(f"row {row} is not in use")
        return state

    def _complaint(self, number: int, start: int, stop: int) -> str:
        """Why positions start .. stop - 1 of a row cannot be computed."""
        row = self._rows[number]
        if row is None:
            return f"row {number} is not in use"
        if stop > row.known:
            return f"row {number} has {row.known} tokens; the plan wants positions {start}..{stop - 1}"
        return f"row {number} has pages up to position {row.page_end}; the plan wants position {stop - 1}"

    # --- inputs -----------------------------------------------------------------------------------------------------

    def _decode(
        self, rows: list[int], starts: list[int], pairs: Pairs
    ) -> tuple[StepShape, list[tuple[int, RowSampling]]]:
        """Slot i is work item i, and is sampled after."""
        known_rows = self._rows
        samples = []
        for number, start in zip(rows, starts, strict=True):
            row = known_rows[number]
            if row is None or start >= row.known or start >= row.page_end:
                raise ValueError(self._complaint(number, start, start + 1))
            row.known += 1
            samples.append(row.sample)
        shape = self._buckets.decode(len(rows), max(starts) // PAGE_TOKENS + 1)
        assert shape is not None, "the caller has looked at the largest batch"
        padding = self._padding.get(shape.tokens)
        if padding is None:
            padding = self._padding[shape.tokens] = self._all_padding(shape.tokens)
        tokens = array("i", [LAST_SAMPLED]) * len(rows)
        if _meets(self._unread, rows):
            self._give(rows, starts, tokens)
        numbers = array("i", rows)
        columns = (tokens, array("i", starts), numbers, numbers, array("i", [start + 1 for start in starts]))
        pairs.put_template(padding, columns)
        return shape, samples

    def _give(self, rows: list[int], starts: list[int], tokens: array[int]) -> None:
        """Put in those tokens of a decode step that plans brought."""
        for slot, (number, start) in enumerate(zip(rows, starts, strict=True)):
            row = self._of(number)
            if start < row.given:
                tokens[slot] = int(row.tokens[start])
            if start + 1 >= row.given:
                self._unread.discard(number)

    def _all_padding(self, size: int) -> Template:
        """The first five parts are those that `_decode` has values for."""
        layout, none, zero = self._layout, [-1] * size, [0] * size
        parts = [
            (layout.token, zero), (layout.position, none), (layout.token_row, zero),
            (layout.sample_row, none), (layout.sample_position, none), (layout.sample_index, list(range(size))),
        ]  # fmt: skip
        return Template(parts, size)

    def _many(self, work: tuple[RowWork, ...], pairs: Pairs) -> tuple[StepShape, list[tuple[int, RowSampling]]]:
        total = end = 0
        sampled: list[tuple[int, RowSampling]] = []
        for w in work:
            state, stop = self._rows[w.row], w.start + w.count
            if state is None or stop > state.known or stop > state.page_end:
                raise ValueError(self._complaint(w.row, w.start, stop))
            total += w.count
            end = max(end, stop)
            if w.samples:
                state.known += 1
                sampled.append(state.sample)
        shape = self._buckets.many(total, (end - 1) // PAGE_TOKENS + 1)
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
        return shape, sampled


def _meets(some: set[int], rows: list[int]) -> bool:
    """Whether any of `rows` is in `some`, which is empty in most steps."""
    return bool(some) and not some.isdisjoint(rows)


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
