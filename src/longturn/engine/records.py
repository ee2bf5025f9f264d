"""The records that cross the engine's borders: requests in, plans to the executor, results back, outputs out.

All are frozen and hold plain Python values, so that they can be logged, compared and sent between processes. Those of
which every step has some, one for each row most of all, are named tuples: making a frozen dataclass takes two to four
times as long, which was half of what the engine spends on a step of 32 rows. Where a step decodes they are made by
`decode_work`, `decode_results` and `decode_output`, which halves it again.

Token ids travel as little-endian int32 `bytes` where there may be many of them.
Times are nanoseconds of the engine's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import repeat
from typing import NamedTuple

_make = tuple.__new__
"""Makes a named tuple of all its fields without a call in Python."""


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian int32 bytes."""
    import array
    import sys

    packed = array.array("i", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """The inverse of `pack_tokens`."""
    import array
    import sys

    packed = array.array("i")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen. Values are validated by the frontend, not here."""

    max_tokens: int
    """Most tokens to generate, at least 1."""
    min_tokens: int = 0
    """Stop tokens are not sampled before this many tokens."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this probability."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the most likely token's probability."""
    seed: int = 0
    """Seed of this request's random stream; the stream depends on it and the token's position alone."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    """OpenAI's penalties: over generated tokens only."""
    repetition_penalty: float = 1.0
    """Hugging Face's penalty: over prompt and generated tokens."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit)."""
    logprobs: int | None = None
    """Number of most likely tokens reported with each token (0: the sampled one alone); None: no logprobs."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output (the model's end tokens among them unless ignored)."""
    grammar: str | None = None
    """What the output must be, as text for the executor's grammar library (`longturn.grammar_library`); the model's end
    tokens are then sampled only where the grammar may end."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens reported with each token of the prompt but the first (0: those alone); None: no
    log-probabilities. The whole prompt is then computed, whatever of it is cached. Only for executors whose
    `ExecutorInfo.scores_prompts` is set."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request as the engine sees it."""

    request_id: str
    prompt: bytes
    """Prompt token ids, int32 little-endian, at least one token."""
    page_hashes: tuple[bytes, ...]
    """Chained hash of each whole page of the prompt, `len(prompt tokens) // PAGE_TOKENS` of them."""
    sampling: SamplingParams
    session_id: str | None = None
    """Requests of one agent session; a session that just finished a turn keeps its pages a little longer."""
    priority: int = 0
    """Lower runs earlier among requests that wait equally long."""
    hash_key: bytes = b""
    """Key of `page_hashes` (`engine.hashing.salt_key`), with which pages completed by generated tokens are hashed too;
    empty: only pages of the prompt are reused."""


class FinishReason(StrEnum):
    STOP = "stop"
    """A stop token was sampled, or the frontend found a stop string."""
    LENGTH = "length"
    """`max_tokens` or the context's end was reached."""
    ABORT = "abort"
    """The client went away or asked for the end."""
    ERROR = "error"
    """The executor failed on this request."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, of the distribution before temperature and truncation."""

    token: float
    """Of the sampled token."""
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()
    """Most likely tokens, descending, and their log-probabilities."""
    rank: int = 0
    """Of a prompt's token: 1 for the most likely one, and so on; 0 where nobody has counted."""


# --- scheduler -> executor -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row of the executor is given to a request: everything the executor needs to know of it, once.

    A request that resumes after preemption comes again with its prompt *and* the tokens generated so far.
    """

    row: int
    request_id: str
    tokens: bytes
    """All token ids known so far (prompt, then generated)."""
    prompt_tokens: int
    """How many of them are the prompt."""
    pages: tuple[int, ...]
    """Page ids, in order, that hold positions 0.. of this request; those below the first computed one are filled."""
    sampling: SamplingParams


class RowWork(NamedTuple):
    """Compute positions `start .. start+count-1` of a row and write their K/V (and other lanes) to its pages.

    Token ids at positions the row does not know from `NewRow` are those sampled for it in earlier steps, which the
    executor holds: the host may not have seen them yet.
    """

    row: int
    start: int
    count: int  # type: ignore[assignment]  # in place of the method of tuples
    samples: bool
    """Sample the token that follows the last of these positions."""
    scores: bool = False
    """Report log-probabilities of those tokens of the prompt that follow these positions."""


def decode_work(rows: Iterable[int], starts: Iterable[int]) -> list[RowWork]:
    """A decode for each row, at its position."""
    return list(map(_make, repeat(RowWork), zip(rows, starts, repeat(1), repeat(True), repeat(False))))


class StepPlan(NamedTuple):
    """One step: differences to the executor's state, then the work. Decodes come first in `work`.

    A plan without work only carries copies, or waits for them: its step ends when one more load has come to its end, or
    at once if all have.
    """

    step_id: int
    work: tuple[RowWork, ...]
    new_rows: tuple[NewRow, ...] = ()
    new_pages: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(row, page ids appended to its page table)."""
    freed_rows: tuple[int, ...] = ()
    """Rows whose request is gone; applied before `new_rows`."""
    copied_pages: tuple[tuple[int, int], ...] = ()
    """(from, to): pages whose whole content is copied before anything of this step is written; both may be the same,
    whose content then stays. Only for executors whose `ExecutorInfo.copies_pages` is set."""
    save_pages: tuple[tuple[int, int], ...] = ()
    """(page, host slot): pages copied to host memory, as they are before anything of this step is written."""
    load_pages: tuple[tuple[int, int], ...] = ()
    """(host slot, page): slots copied back, after this plan's saves and page copies.

    Both kinds, only for executors with `ExecutorInfo.host_pages`, run beside steps. The executor makes whatever touches
    the same page or slot later, in the order of plans, wait for them: no plan reads a page before a `StepResult` has
    said that it is loaded, but it may overwrite one that is still being saved. Copies are made whether their step
    fails or not, and a copy that fails is no failure of the step."""

    @property
    def tokens(self) -> int:
        return sum(w.count for w in self.work)


# --- executor -> scheduler -------------------------------------------------------------------------------------------


class RowResult(NamedTuple):
    """What one row sampled in a step."""

    row: int
    token_ids: tuple[int, ...]
    """One token without speculation; accepted drafts and one more with it."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token if the request asked for them."""
    error: str | None = None
    """This row failed (for example NaN logits); the others are unaffected, also in steps launched before this result is
    read: those may still have work on this row, and whatever they answer for it is dropped."""


def decode_results(rows: Iterable[int], tokens: Iterable[int]) -> tuple[RowResult, ...]:
    """One token for each row, and nothing else to say."""
    return tuple(map(_make, repeat(RowResult), zip(rows, zip(tokens), repeat(()), repeat(None))))


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of a prompt's tokens, in order: those that follow the positions of one work item."""

    row: int
    logprobs: tuple[TokenLogprobs, ...]


class StepResult(NamedTuple):
    step_id: int
    rows: tuple[RowResult, ...]
    """One for each work item with `samples`, in the plan's order."""
    elapsed_ns: int = 0
    """Time the device spent on the step."""
    loaded_pages: tuple[int, ...] = ()
    """Pages whose load has been completed, of all plans launched so far, each said once."""
    lost_pages: tuple[int, ...] = ()
    """Pages whose load has failed, likewise: they hold nothing."""
    lost_slots: tuple[int, ...] = ()
    """Host slots whose save has failed: they hold nothing, and loads from them fail as well."""
    scores: tuple[PromptScores, ...] = ()
    """One for each work item with `scores`, in the plan's order."""


# --- engine -> frontend ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When things happened to a request, in the engine's clock."""

    arrived_ns: int
    scheduled_ns: int
    """First scheduled for computation."""
    first_token_ns: int
    finished_ns: int


class RequestOutput(NamedTuple):
    """New tokens of one request after one step; none, where a prompt takes more than one step, when it is admitted."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token that ended the output; it is not in `token_ids`."""
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache when the request was first scheduled."""
    times: RequestTimes | None = None
    """Set when the request finishes."""
    error: str | None = None
    preemptions: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's next tokens, beginning with its second one, if the request asked for them."""


def decode_output(
    request_id: str, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], cached_tokens: int,
    preemptions: int,
) -> RequestOutput:  # fmt: skip
    """New tokens of a request that goes on."""
    fields = (request_id, token_ids, logprobs, None, None, cached_tokens, None, None, preemptions, ())
    return _make(RequestOutput, fields)


class EngineStats(NamedTuple):
    """A snapshot for metrics: gauges, and counters since the start."""

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_used: int = 0
    """Referenced by requests."""
    pages_cached: int = 0
    """Free but holding a reusable prefix."""
    steps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of requests admitted."""
    cached_tokens: int = 0
    """Of those, tokens served from the prefix cache."""
    generated_tokens: int = 0
    preemptions: int = 0
    evictions: int = 0
    aborts: int = 0
    leak_faults: int = 0
    """Failed idle invariant checks; anything but 0 is a bug."""
    busy_ns: int = 0
    """Time with a step in flight."""
    host_pages_total: int = 0
    """Pages that the host tier can hold."""
    host_pages_cached: int = 0
    """Pages that it holds."""
    offloaded_pages: int = 0
    """Pages copied to host memory."""
    loaded_pages: int = 0
    """Pages copied back."""
    host_hit_tokens: int = 0
    """Of `cached_tokens`, tokens that were found in host memory."""


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Everything that leaves the engine after one step, in one message."""

    outputs: tuple[RequestOutput, ...] = ()
    stats: EngineStats = field(default_factory=EngineStats)
