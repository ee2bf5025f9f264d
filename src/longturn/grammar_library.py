"""The grammar library (llguidance) behind one door: a vocabulary in, matchers out.

The frontend compiles a grammar to refuse what cannot be compiled, the executor to follow it token by token; both must
mean the same by it, so limits, end tokens and tokenisation are set here. The library is loaded by the first call.

What was measured of llguidance 1.9 and is relied on here: it gives up the interpreter lock while it builds, so other
threads run; its fuel limits end every hostile schema that was tried in under a second; and a matcher that has run into
an error or a limit allows the end tokens alone, so `error_of` must be asked after every mask, or the answer would stop
in the middle and look finished.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_LEXER_STATES = 50_000
"""Of one grammar, 1 to 2 kB each: bounds its memory at about 100 MB (the library's own default is five times that)."""
MAX_ERROR_CHARS = 240
NICENESS = 10
"""Of threads that compile, above the process's own: a tenth of a core that others want, all of one that is free."""

K = TypeVar("K")
V = TypeVar("V")

_EXCERPT = re.compile(r"\n *[0-9]+ \| ")
"""Where the library begins to show the grammar that it complains of, line by line."""
CANNOT_FOLLOW = "the grammar cannot be followed"
"""How the error of a request begins whose grammar compiles and is too much for the library later on."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a grammar must know of a tokenizer."""

    tokens: tuple[bytes, ...]
    """Bytes of every token id; empty for ids without a token. One for each row of the model's output head."""
    special_ids: tuple[int, ...]
    """Tokens that are not text: only a grammar that names them by number allows them."""
    end_ids: tuple[int, ...]
    """Tokens that end an answer, at least one."""
    encode: Callable[[str], list[int]]
    """Token ids of a text, in which special tokens that are written out stay text."""


class LongestFirst:
    """Encodes bytes by the longest ordinary token at every place: not as a model would write them, but right."""

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int]) -> None:
        special = frozenset(special_ids)
        self._ids = {text: token for token, text in enumerate(tokens) if text and token not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, data: bytes) -> list[int]:
        """Ends early at a byte that no token begins with."""
        ids, at = [], 0
        while at < len(data):
            for length in range(min(self._longest, len(data) - at), 0, -1):
                if (token := self._ids.get(data[at : at + length])) is not None:
                    ids.append(token)
                    at += length
                    break
            else:
                break
        return ids


class _Wrapped:
    """A vocabulary under the names that the library asks for."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.end_ids[0]
        self.bos_token_id = None
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = list(vocabulary.special_ids)
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def library_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """The library's form of a vocabulary: about 0.15 s for 49,000 tokens, to be built once."""
    from llguidance import LLTokenizer

    return LLTokenizer(
        _Wrapped(vocabulary),  # type: ignore[arg-type]  # any object with these attributes will do
        n_vocab=len(vocabulary.tokens),
        eos_token=list(vocabulary.end_ids),
        slices=LLTokenizer.json_slices(),
    )


def new_matcher(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """A matcher at the beginning of the grammar `text`. It never raises for the grammar's sake: see `error_of`."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    return LLMatcher(tokenizer, text, log_level=0, limits=limits)


def lower_priority() -> None:
    """Let this thread yield to those that answer requests: compiling is pure computation, and steps use every core."""
    if sys.platform == "linux":  # elsewhere priorities are those of whole processes
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)


def drop_oldest(builds: OrderedDict[K, Future[V]], kept: int) -> None:
    """Drop finished builds, the oldest first, until `kept` are left; unfinished ones stay, since somebody waits."""
    surplus = len(builds) - kept
    if surplus > 0:
        for key in [key for key, build in builds.items() if build.done()][:surplus]:
            del builds[key]


def error_of(matcher: LLMatcher) -> str | None:
    """What is wrong with a matcher, in one line; None if nothing is."""
    if not matcher.is_error():
        return None
    said = _EXCERPT.split(str(matcher.get_error()), maxsplit=1)[0]
    line = " ".join(said.replace("<non-verbose/>", "").split())
    return line if len(line) <= MAX_ERROR_CHARS else line[: MAX_ERROR_CHARS - 3] + "..."
