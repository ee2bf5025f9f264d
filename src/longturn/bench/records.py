"""What the load client measures. Times are nanoseconds of one monotonic clock (`time.perf_counter_ns`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """One streamed event that carried output (text, reasoning or a part of a tool call)."""

    at_ns: int
    tokens: int | None
    """Tokens in it, where the server says so (`token_ids`); one event may bundle several."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request, from the moment it should have been sent to the end of its stream."""

    intended_ns: int
    """When the schedule wanted it sent; `sent_ns - intended_ns` is the client's own lag."""
    sent_ns: int
    end_ns: int
    """End of the whole stream, not of the last visible text: a parser may swallow output."""
    first_byte_ns: int | None = None
    """Response headers arrived."""
    chunks: tuple[Chunk, ...] = ()
    text: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    """The server's own counts; a client never tokenises."""
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
