"""The executor's state: one fixed row a running request, changed only by the differences that plans bring.

A row knows its token ids (the host's, and those it sampled itself), its pages and how to sample. `apply` brings a
plan's differences in; `inputs` turns the plan's work into the flat arrays that a model computes on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longturn.config import PAGE_TOKENS
from longturn.engine.records import NewRow, RowWork, StepPlan
from longturn.executor.grammar import GrammarRow, Grammars
from longturn.executor.sampler import SamplingState

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The work of one step as flat arrays. T tokens in all; a row's tokens are contiguous and in order."""

    tokens: Int32
    """[T] token ids."""
    positions: Int32
    """[T] position of each token in its sequence."""
    query_starts: Int32
    """[R + 1] tokens query_starts[r] .. query_starts[r+1]-1 belong to the r-th work item."""
    rows: Int32
    """[R] row of each work item: the index into `page_tables`."""
    page_tables: Int32
    """[rows, max pages] page ids; entries past a row's pages are 0, the null page."""
    sample_index: Int32
    """[n] indices into the T tokens whose next token is wanted, or its log-probability: of each work item those that
    score, then the one that samples."""


class Rows:
    """Fixed-size host arrays for all rows. Not thread-safe: one thread applies plans in the order of their launch."""

    def __init__(self, rows: int, max_context_tokens: int, vocab_size: int, grammars: Grammars | None = None) -> None:
        """`grammars`: for requests that bring one; such a request fails if None."""
        self.vocab_size = vocab_size
        self._grammars = grammars
        max_pages = -(-max_context_tokens // PAGE_TOKENS)
        self.page_tables = np.zeros((rows, max_pages), np.int32)
        self._tokens = np.zeros((rows, max_context_tokens + 1), np.int32)
        self._known = np.zeros(rows, np.int32)
        self._prompt = np.zeros(rows, np.int32)
        self._pages = np.zeros(rows, np.int32)
        self._sampling: list[SamplingState | None] = [None] * rows

    def apply(self, plan: StepPlan) -> None:
        """Free rows, fill new ones, append pages: in this order, as the plan's contract says."""
        for row in plan.freed_rows:
            self._sampling[row] = None
            self._known[row] = 0
            self.page_tables[row, : self._pages[row]] = 0
            self._pages[row] = 0
        for new in plan.new_rows:
            tokens = np.frombuffer(new.tokens, "<i4").astype(np.int32, copy=False)
            self._tokens[new.row, : len(tokens)] = tokens
            self._known[new.row] = len(tokens)
            self._prompt[new.row] = new.prompt_tokens
            self.page_tables[new.row] = 0
            self.page_tables[new.row, : len(new.pages)] = new.pages
            self._pages[new.row] = len(new.pages)
            self._sampling[new.row] = SamplingState.create(
                new.sampling, tokens, new.prompt_tokens, self.vocab_size, self._grammar(new, tokens)
            )
        for row, pages in plan.new_pages:
            first = int(self._pages[row])
            self.page_tables[row, first : first + len(pages)] = pages
            self._pages[row] = first + len(pages)

    def inputs(self, work: tuple[RowWork, ...]) -> StepInputs:
        """Flat arrays for a step's work.

        Raises:
            ValueError: work refers to a token that is neither given nor sampled, or to a page the row does not have.
        """
        total = sum(w.count for w in work)
        tokens = np.empty(total, np.int32)
        positions = np.empty(total, np.int32)
        query_starts = np.zeros(len(work) + 1, np.int32)
        sample_index: list[int] = []
        at = 0
        for item, w in enumerate(work):
            end = w.start + w.count
            if end > self._known[w.row]:
                raise ValueError(
                    f"row {w.row} has {self._known[w.row]} tokens; the plan wants positions {w.start}..{end - 1}"
                )
            if end > self._pages[w.row] * PAGE_TOKENS:
                raise ValueError(f"row {w.row} has {self._pages[w.row]} pages; the plan wants position {end - 1}")
            tokens[at : at + w.count] = self._tokens[w.row, w.start : end]
            positions[at : at + w.count] = np.arange(w.start, end, dtype=np.int32)
            at += w.count
            query_starts[item + 1] = at
            if w.scores:
                sample_index.extend(range(at - w.count, at - w.count + self.scored(w)))
            if w.samples:
                sample_index.append(at - 1)
        rows = np.array([w.row for w in work], np.int32)
        return StepInputs(tokens, positions, query_starts, rows, self.page_tables, np.array(sample_index, np.int32))

    def scored(self, work: RowWork) -> int:
        """Positions of a work item with `scores` that are followed by a token of the prompt."""
        return max(0, min(work.start + work.count, int(self._prompt[work.row]) - 1) - work.start)

    def following(self, work: RowWork) -> Int32:
        """[scored] the tokens that follow those positions."""
        tokens: Int32 = self._tokens[work.row, work.start + 1 : work.start + 1 + self.scored(work)]
        return tokens

    def _grammar(self, new: NewRow, tokens: Int32) -> GrammarRow | None:
        text = new.sampling.grammar
        if text is None:
            return None
        if self._grammars is None:
            return GrammarRow(None, self.vocab_size, (), error="this executor has no grammars")
        return self._grammars.row(text, tokens[new.prompt_tokens :].tolist())

    def sampling(self, row: int) -> SamplingState:
        state = self._sampling[row]
        if state is None:
            raise ValueError(f"row {row} is not in use")
        return state

    def append(self, row: int, token: int) -> None:
        """Record a token that the row sampled; it is the input at the next position."""
        self.sampling(row).append(token)
        self._tokens[row, self._known[row]] = token
        self._known[row] += 1
