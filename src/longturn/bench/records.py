"""What the load client measures. Times are nanoseconds of one monotonic clock (`time.perf_counter_ns`)."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload


@dataclass(frozen=True, slots=True)
class Chunk:
    """One streamed event that carried output (text, reasoning or a part of a tool call)."""

    at_ns: int
    tokens: int | None
    """Tokens in it, where the server says so (`token_ids`); one event may bundle several."""


class Chunks(Sequence[Chunk]):
    """The events of one answer in twelve bytes each: an hour of 64 streams has twenty million."""

    __slots__ = ("_times", "_tokens")

    def __init__(self, times_ns: array[int], tokens: array[int]) -> None:
        """
        Args:
            times_ns: `at_ns` of each.
            tokens: of each, -1 where the server does not say.
        """
        self._times = times_ns
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._times)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> Chunks: ...
    def __getitem__(self, index: int | slice) -> Chunk | Chunks:
        if isinstance(index, slice):
            return Chunks(self._times[index], self._tokens[index])
        tokens = self._tokens[index]
        return Chunk(self._times[index], None if tokens < 0 else tokens)

    def __iter__(self) -> Iterator[Chunk]:
        for at_ns, tokens in zip(self._times, self._tokens, strict=True):
            yield Chunk(at_ns, None if tokens < 0 else tokens)

    def __repr__(self) -> str:
        return f"Chunks({list(self)!r})"


@dataclass(frozen=True, slots=True)
class Answer:
    """One request, from the moment it should have been sent to the end of its stream."""

    intended_ns: int
    """When the schedule wanted it sent; `sent_ns - intended_ns` is the client's own lag."""
    sent_ns: int
    end_ns: int
    """End of the whole stream, not of the last visible text: a parser may swallow output."""
    chunks: Sequence[Chunk] = ()
    text: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    """The server's own counts; a client never tokenises."""
    token_ids: tuple[int, ...] | None = None
    """Of the output, where the server sends them (`return_token_ids`)."""
    finish: str | None = None
    error: str | None = None
    """One line; None if the answer is complete."""

    @property
    def ok(self) -> bool:
        return self.error is None


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One measured turn of one session."""

    session: str
    """Session id, with the number of the copy where a session is replayed several times: `repo_fix#2`."""
    index: int
    """Turn number, from 0."""
    label: str
    lane: int
    answer: Answer
