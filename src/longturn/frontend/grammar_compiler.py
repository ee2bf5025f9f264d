"""Grammars are tried before a request goes to the engine, in processes of their own and within limits, and kept.

What is refused, for whatever reason, is that request's error and nobody else's problem: a grammar that computes too
long or breaks its process costs that process (see `grammar_child`). The event loop only waits.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from longturn.errors import OverloadedError, RequestError
from longturn.frontend.grammar import GrammarSpec
from longturn.frontend.grammar_checker import GrammarChecker
from longturn.frontend.grammar_child import Checked, Start
from longturn.frontend.grammar_reasoning import ReasoningMarks
from longturn.grammar_library import Vocabulary, drop_oldest

KEPT = 128
"""Grammars whose outcome is remembered."""
PROCESSES = 2
"""Most grammars that are tried at once; the second process starts when the first one is busy."""
MAX_UNFINISHED = 32
"""Grammars that are tried or wait for it; one more is refused with 429."""

_Key = tuple[GrammarSpec, ReasoningMarks | None]
"""The spec without what messages alone need."""
_PLACE = re.compile(r"at ([0-9]+)\([0-9]+\): (failed to compile JSON schema: )?")
"""How the library says in which line of a grammar it has found what it complains of."""


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What one grammar may cost."""

    timeout_s: float = 5.0
    """Longest time that trying it may take."""
    max_bytes: int = 256 * 1024
    """Largest text or schema, as UTF-8."""


class GrammarCompiler:
    """Checked grammars of one model. `compile` is to be called from one event loop, `compile_now` from any thread."""

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        limits: GrammarLimits | None = None,
        *,
        kept: int = KEPT,
    ) -> None:
        """
        Args:
            vocabulary: called in a thread when the first grammar comes.
            limits: of one grammar; the default ones if None.
            kept: outcomes to keep, the most recently used.
        """
        self._load = vocabulary
        self._limits = limits or GrammarLimits()
        self._kept = kept
        self._lock = threading.Lock()
        self._builds: OrderedDict[_Key, Future[Checked]] = OrderedDict()
        self._start: Future[Start] | None = None
        self._idle: list[GrammarChecker] = []
        # A thread waits for its process, and computes nothing itself.
        self._threads = ThreadPoolExecutor(PROCESSES, thread_name_prefix="longturn-grammar")
        weakref.finalize(self, _close_all, self._idle)

    async def compile(self, spec: GrammarSpec, marks: ReasoningMarks | None = None) -> str:
        """The text of `SamplingParams.grammar`.

        Args:
            spec: what the answer must be.
            marks: the model reasons before it answers; the grammar holds behind that.

        Raises:
            RequestError: the grammar is too large, cannot be compiled, or takes too long; `param` is the spec's.
            OverloadedError: too many grammars are being tried.
            LongturnError: the process for it does not start.
        """
        self._check_size(spec)
        build = self._build(spec, marks)
        if not build.done():
            waited = asyncio.wrap_future(build)
            await asyncio.wait([waited], timeout=self._limits.timeout_s)
            if not build.done() and not build.cancel():
                await asyncio.wait([waited])
        return self._outcome(spec, build)

    def compile_now(self, spec: GrammarSpec, marks: ReasoningMarks | None = None) -> str:
        """As `compile`, and waits for it."""
        self._check_size(spec)
        build = self._build(spec, marks)
        concurrent.futures.wait([build], timeout=self._limits.timeout_s)
        if not build.done() and not build.cancel():
            concurrent.futures.wait([build])
        return self._outcome(spec, build)

    def _check_size(self, spec: GrammarSpec) -> None:
        most = self._limits.max_bytes
        # A character has one byte at least, so that the text of a far too large one is not encoded.
        if len(spec.text) > most or len(spec.text.encode("utf-8", "replace")) > most:
            of_tools = ": the schemas of the tools have" if spec.tools else " has"
            raise RequestError(
                f"'{spec.param}'{of_tools} more than {most} bytes (server.grammar_max_bytes)",
                param=spec.param,
                code="invalid_grammar",
            )

    def _build(self, spec: GrammarSpec, marks: ReasoningMarks | None) -> Future[Checked]:
        key = (replace(spec, param="", tools=()), marks)
        with self._lock:
            build = self._builds.get(key)
            if build is not None and not _again(build):
                self._builds.move_to_end(key)
                return build
            if sum(not other.done() for other in self._builds.values()) >= MAX_UNFINISHED:
                raise OverloadedError("too many grammars are being compiled; try again later", param=spec.param)
            drop_oldest(self._builds, self._kept - 1)
            build = self._builds[key] = self._threads.submit(self._checked, *key)
            return build

    def _outcome(self, spec: GrammarSpec, build: Future[Checked]) -> str:
        if build.cancelled():
            raise OverloadedError("other requests' grammars are being compiled; try again later", param=spec.param)
        checked = build.result()
        if checked.timed_out:
            raise RequestError(
                f"'{spec.param}' cannot be compiled: {checked.refusal}", param=spec.param, code="grammar_too_complex"
            )
        if checked.refusal is not None:
            raise _refused(spec, checked.refusal)
        return checked.text

    def _checked(self, spec: GrammarSpec, marks: ReasoningMarks | None) -> Checked:
        """On a thread: try a grammar in an idle process, or in a new one."""
        with self._lock:
            checker = self._idle.pop() if self._idle else None
            if self._start is None:
                first = self._start = Future()
            else:
                first = None
        if first is not None:
            try:
                first.set_result(_start_of(self._load()))
            except Exception as error:
                first.set_exception(error)
        start = self._start.result()
        if not start.end_ids:
            return Checked(refusal="the model has no token that ends an answer")
        checker = checker or GrammarChecker(start)
        checked = checker.check(spec, marks, self._limits.timeout_s)
        with self._lock:
            self._idle.append(checker)
        return checked


def _again(build: Future[Checked]) -> bool:
    """Whether an outcome says nothing of the next try: the time ran out, or something broke that is not the grammar."""
    if not build.done():
        return False
    return build.cancelled() or build.exception() is not None or build.result().timed_out


def _start_of(vocabulary: Vocabulary) -> Start:
    return Start(vocabulary.tokens, vocabulary.special_ids, vocabulary.end_ids)


def _close_all(checkers: list[GrammarChecker]) -> None:
    for checker in checkers:
        checker.close()


def _refused(spec: GrammarSpec, refusal: str) -> RequestError:
    """The library's complaint in words of the request: it knows lines of a grammar that no client has written."""
    subject = f"'{spec.param}'"
    place = _PLACE.match(refusal)
    if place is not None and spec.kind != "ebnf":
        refusal = refusal[place.end() :]
        line = int(place[1]) - 1
        if line < len(spec.tools) and (tool := spec.tools[line]):
            subject += f": the schema of the tool '{tool}'"
    return RequestError(f"{subject} cannot be compiled: {refusal}", param=spec.param, code="invalid_grammar")
