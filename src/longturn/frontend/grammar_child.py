"""The process in which grammars are tried: `python -m longturn.frontend.grammar_child`, started by `grammar_checker`.

A hostile grammar can do what no limit of the library stops: overflow its stack (a few thousand schemas that refer to
each other), or compute for minutes (the intersection of some hundred patterns). Here it costs this process and one
answer. What passes is compiled again by the engine, on a thread with several times this stack.

Frames on standard input and output are a length of four bytes and msgpack: first a `Start`, answered when the
vocabulary is ready, then a `Job` at a time, answered by `Checked`. The end of the input ends the process.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, BinaryIO

import msgspec

from longturn.frontend.grammar import GrammarSpec, library_text
from longturn.frontend.grammar_reasoning import ReasoningMarks, behind_reasoning
from longturn.grammar_library import NICENESS, LongestFirst, Vocabulary, error_of, library_tokenizer, new_matcher

if TYPE_CHECKING:
    from llguidance import LLTokenizer

STACK_BYTES = 1 << 20
MEMORY_BYTES = 2 << 30
"""Address space of the process, on Linux."""
PROBED_STEPS = 4
"""Tokens for which a grammar is followed: some limits are met only on the way."""
MAX_STEP_S = 0.03
"""Most computing time that one token's mask may take, after the first one: every other request waits for it."""


@dataclass(frozen=True, slots=True)
class Start:
    """The vocabulary. Forced text is encoded by the longest tokens: not the engine's way, but of about its cost."""

    tokens: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    end_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Job:
    spec: GrammarSpec
    marks: ReasoningMarks | None


@dataclass(frozen=True, slots=True)
class Checked:
    """Outcome of a job: the grammar's text for the library, or why there is none."""

    text: str = ""
    refusal: str | None = None
    timed_out: bool = False


def write_frame(out: IO[bytes], record: Start | Job | Checked) -> None:
    data = msgspec.msgpack.encode(record)
    out.write(struct.pack("<I", len(data)) + data)
    out.flush()


def checked(tokenizer: LLTokenizer, spec: GrammarSpec, marks: ReasoningMarks | None) -> Checked:
    """Compile a grammar and follow it for some tokens."""
    try:
        text = library_text(spec)
    except ValueError as error:
        return Checked(refusal=str(error))
    if marks is not None:
        text = behind_reasoning(text, marks, may_open_line=spec.kind in ("json_object", "json_schema"))
    matcher = new_matcher(tokenizer, text)
    for step in range(PROBED_STEPS):
        if (refusal := error_of(matcher)) is not None:
            return Checked(refusal=refusal)
        begin_s = time.thread_time()
        mask = matcher.compute_bitmask()
        took_s = time.thread_time() - begin_s
        if (refusal := error_of(matcher)) is not None:
            return Checked(refusal=refusal)
        if step and took_s > MAX_STEP_S:
            return Checked(refusal=f"following it takes {took_s * 1e3:.0f} ms a token")
        token = _some_token(mask, tokenizer.eos_tokens)
        if token is None:
            break
        matcher.consume_token(token)
    return Checked(text)


def _some_token(mask: bytes, end_ids: Sequence[int]) -> int | None:
    """The first allowed token that does not end the answer."""
    for place, byte in enumerate(mask):
        for bit in range(8) if byte else ():
            if byte >> bit & 1 and (token := place * 8 + bit) not in end_ids:
                return token
    return None


def main() -> None:
    """The process: one thread with a stack of its own size does everything."""
    parent = os.getppid()
    # Frames go out where nothing else can write to.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        import resource

        os.nice(NICENESS)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(sys.stdin.buffer, out), daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(1.0)
        if os.getppid() != parent:
            os._exit(0)  # in the middle of a computation the end of the input would not be seen


def _serve(source: BinaryIO, out: BinaryIO) -> None:
    frame = _read_frame(source)
    if frame is None:
        return
    start = msgspec.msgpack.decode(frame, type=Start)
    encode = LongestFirst(start.tokens, start.special_ids)
    vocabulary = Vocabulary(start.tokens, start.special_ids, start.end_ids, lambda text: encode(text.encode()))
    tokenizer = library_tokenizer(vocabulary)
    write_frame(out, Checked())
    # What the library prints when it gives up on a grammar is not for the server's log.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.dup2(null, 1)
    while (frame := _read_frame(source)) is not None:
        job = msgspec.msgpack.decode(frame, type=Job)
        write_frame(out, checked(tokenizer, job.spec, job.marks))


def _read_frame(source: BinaryIO) -> bytes | None:
    head = source.read(4)
    if len(head) < 4:
        return None
    (length,) = struct.unpack("<I", head)
    data = source.read(length)
    return data if len(data) == length else None


if __name__ == "__main__":
    main()
