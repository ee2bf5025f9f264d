"""Grammars in the executor: which tokens a row may sample next.

A grammar's text is compiled once in the background and kept as a prototype; a row gets a copy (some ten microseconds),
led through the tokens that were generated before a preemption. A grammar that fails is that row's error alone.

Whoever samples calls, for each row that has a `GrammarRow`: `mask()` before the row's token is chosen, `advance` with
the token after. So a position's token must be known to the host before the mask of the next one: an executor that runs
ahead launches the forward pass of the next step, and holds back only its sampling until then. A speculative decoder
would lead a copy of the row through the drafts, a mask for each of them, and go on from the last accepted one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from longturn.grammar_library import (
    CANNOT_FOLLOW,
    Vocabulary,
    drop_oldest,
    error_of,
    library_tokenizer,
    lower_priority,
    new_matcher,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT_GRAMMARS = 64
"""Compiled grammars kept for the next request that has them."""


class GrammarError(ValueError):
    """A row's grammar cannot be followed (any further)."""


class GrammarRow:
    """The place of one sequence in its grammar."""

    __slots__ = ("_end_ids", "_ended", "_error", "_matcher", "_words")

    def __init__(
        self, matcher: LLMatcher | None, vocab_size: int, end_ids: Sequence[int], *, error: str | None = None
    ) -> None:
        """
        Args:
            matcher: at the beginning of the grammar; owned by this object. None only together with `error`.
            vocab_size: rows of the model's output head.
            end_ids: tokens that end an answer.
            error: the grammar could not be compiled; `mask` says so.
        """
        self._matcher = matcher
        self._end_ids = tuple(end_ids)
        self._ended = False
        self._error = error
        self._words = np.zeros(-(-vocab_size // 32), np.int32)

    def mask(self) -> npt.NDArray[np.int32]:
        """[ceil(vocab / 32)] int32: bit i % 32 of word i // 32 is set where token i may come next. Valid until the
        next call. End tokens are allowed where the grammar may end, and nothing else once it has.

        Raises:
            GrammarError: the grammar could not be compiled, or following it took too much.
        """
        words, matcher = self._words, self._matcher
        if self._error is None and not self._ended and matcher is not None:
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            self._error = error_of(matcher)
        if self._error is not None:
            raise GrammarError(f"{CANNOT_FOLLOW}: {self._error}")
        if self._ended:
            words[:] = 0
            bits = words.view(np.uint32)
            for token in self._end_ids:
                bits[token // 32] |= np.uint32(1 << token % 32)
        return words

    def advance(self, token: int) -> None:
        """Go on by a sampled token. One that the grammar does not allow shows in the next `mask`."""
        matcher = self._matcher
        if self._error is not None or self._ended or matcher is None:
            return
        if token in self._end_ids and matcher.is_accepting():
            self._ended = True
        elif not matcher.consume_token(token):
            self._error = error_of(matcher) or f"token {token} is not allowed here"

    def advance_all(self, tokens: Sequence[int]) -> None:
        """`advance` for each of the tokens."""
        for token in tokens:
            self.advance(token)


class Grammars:
    """Compiled grammars of one executor. `ready` may be called from any thread, `row` from one."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], vocab_size: int, *, kept: int = KEPT_GRAMMARS) -> None:
        """
        Args:
            vocabulary: called in the background when the first grammar comes.
            vocab_size: rows of the model's output head, as many as the vocabulary has tokens.
            kept: compiled grammars to keep, the most recently used.
        """
        self._load = vocabulary
        self._vocab_size = vocab_size
        self._kept = kept
        self._lock = threading.Lock()
        self._builds: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._loaded: tuple[Vocabulary, LLTokenizer] | None = None
        # One thread: a second would only take the processor from the steps that are running.
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="longturn-grammar", initializer=lower_priority)

    def ready(self, text: str) -> bool:
        """Whether `row` would return at once; starts to compile the grammar if nobody has."""
        return self._build(text).done()

    def row(self, text: str, generated: Sequence[int]) -> GrammarRow:
        """A row at the place in its grammar where `generated` leads; waits until the grammar is compiled."""
        build = self._build(text)
        try:
            prototype = build.result()
        except Exception as error:
            self._forget(text, build)
            return GrammarRow(None, self._vocab_size, (), error=f"{type(error).__name__}: {error}")
        assert self._loaded is not None
        row = GrammarRow(prototype.deep_copy(), self._vocab_size, self._loaded[0].end_ids)
        row.advance_all(generated)
        return row

    def close(self) -> None:
        """End the background thread; a grammar that is being compiled is waited for."""
        self._builder.shutdown(cancel_futures=True)

    def _build(self, text: str) -> Future[LLMatcher]:
        with self._lock:
            build = self._builds.get(text)
            if build is None:
                drop_oldest(self._builds, self._kept - 1)
                build = self._builds[text] = self._builder.submit(self._compile, text)
            else:
                self._builds.move_to_end(text)
            return build

    def _forget(self, text: str, build: Future[LLMatcher]) -> None:
        with self._lock:
            if self._builds.get(text) is build:
                del self._builds[text]

    def _compile(self, text: str) -> LLMatcher:
        if self._loaded is None:
            vocabulary = self._load()
            if len(vocabulary.tokens) != self._vocab_size:
                raise ValueError(f"{len(vocabulary.tokens)} tokens for a model of {self._vocab_size}")
            self._loaded = vocabulary, library_tokenizer(vocabulary)
        matcher = new_matcher(self._loaded[1], text)
        if error_of(matcher) is None:
            matcher.compute_bitmask()  # what the first mask has to work out is in the copies, too
        return matcher
