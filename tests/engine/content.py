"""An executor that keeps what pages really hold, and the naive oracle that its outputs must equal.

Every position of a page holds a number that depends on the whole prefix up to it. Before a row computes, everything it
is about to read must hold exactly the numbers of its own prefix: wrong sharing, use after free, a page with two owners,
a page handed out before it was computed all show as a wrong number. The next token is a function of the prefix, so a
run that was batched, chunked, cached or preempted must produce the oracle's tokens.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from longturn.config import PAGE_TOKENS, CacheConfig, SchedulerConfig
from longturn.engine.clock import VirtualClock
from longturn.engine.hashing import page_hashes, salt_key
from longturn.engine.loop import Engine
from longturn.engine.protocols import ExecutorInfo
from longturn.engine.records import (
    EngineRequest,
    FinishReason,
    NewRow,
    PromptScores,
    RequestOutput,
    RowResult,
    RowWork,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenLogprobs,
    pack_tokens,
    unpack_tokens,
)

VOCAB = 97
STOP_TOKEN = 5
_MASK = (1 << 61) - 1


def mix(state: int, token: int) -> int:
    """Number of a position from the number of the one before and its token."""
    value = (state * 6364136223846793005 + (token + 1) * 1442695040888963407) & _MASK
    return value ^ (value >> 29)


def prefix_numbers(tokens: Sequence[int]) -> list[int]:
    numbers, state = [], 1
    for token in tokens:
        state = mix(state, token)
        numbers.append(state)
    return numbers


def sample(number: int, generated: int, sampling: SamplingParams) -> int:
    """The token after a prefix. `generated` tokens came before it; stop tokens are masked below `min_tokens`."""
    token = (number >> 7) % VOCAB
    if generated < sampling.min_tokens and token in sampling.stop_token_ids:
        return VOCAB
    return token


def oracle(prompt: Sequence[int], sampling: SamplingParams, limit: int) -> tuple[list[int], FinishReason]:
    """Output tokens and the reason they end, one token at a time."""
    state = prefix_numbers(prompt)[-1]
    output: list[int] = []
    while True:
        token = sample(state, len(output), sampling)
        if token in sampling.stop_token_ids and len(output) >= sampling.min_tokens:
            return output, FinishReason.STOP
        output.append(token)
        if len(output) == sampling.max_tokens or len(prompt) + len(output) == limit:
            return output, FinishReason.LENGTH
        state = mix(state, token)


def prompt_logprob(number: int, token: int) -> TokenLogprobs:
    """What a prompt's token is said to have as its log-probability, behind a prefix."""
    return TokenLogprobs(-float(number % 1009), rank=token + 1)


@dataclass
class Row:
    new: NewRow
    tokens: list[int]
    numbers: list[int]
    pages: list[int]
    tainted: bool = False
    """A failed step should have computed part of it: what it computes from then on is rubbish."""


@dataclass
class Costs:
    """Virtual nanoseconds of a step."""

    step: int = 5_000_000
    token: int = 100_000
    pair: int = 20


@dataclass
class ContentExecutor:
    """Computes at launch, as a device with an ordered queue would; time passes when a result is read."""

    info: ExecutorInfo
    clock: VirtualClock
    costs: Costs = field(default_factory=Costs)
    fail_steps: set[int] = field(default_factory=set)
    """Steps whose result raises, and that write rubbish."""
    fail_rows: set[str] = field(default_factory=set)
    """Requests whose sampling fails."""
    plans: list[StepPlan] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        self.pages = [[0] * PAGE_TOKENS for _ in range(self.info.pages)]
        self.rows: dict[int, Row] = {}
        self.unread: dict[int, set[int]] = {}
        """Launched and unread steps, and the pages that they touch."""

    def launch(self, plan: StepPlan) -> ContentHandle:
        self.plans.append(plan)
        for row in plan.freed_rows:
            assert row in self.rows, f"row {row} is freed but not held"
            del self.rows[row]
        touched = set().union(*self.unread.values()) if self.unread else set()
        first_work = {work.row: work.start for work in reversed(plan.work)}
        for new in plan.new_rows:
            assert new.row not in self.rows, f"row {new.row} is given to {new.request_id} while it is held"
            assert 0 <= new.row < self.info.rows
            tokens = unpack_tokens(new.tokens)
            self.rows[new.row] = Row(new, tokens, prefix_numbers(tokens), list(new.pages))
            assert len(new.pages) == -(-len(tokens) // PAGE_TOKENS)
            self._check_fresh(new.pages[first_work[new.row] // PAGE_TOKENS :], touched)
        for row, pages in plan.new_pages:
            self._check_fresh(pages, touched)
            self.rows[row].pages.extend(pages)
        if plan.step_id in self.fail_steps:
            for work in plan.work:
                self.rows[work.row].tainted = True
        results = [self._compute(work.row, work.start, work.count, work.samples) for work in plan.work]
        scores = tuple(self._score(work) for work in plan.work if work.scores)
        assert len(scores) <= 1, "logits of several prompts in one step"
        assert len({work.row for work in plan.work}) == len(plan.work), "a row has two work items in one step"
        assert plan.work or self.info.host_pages, "an empty step"
        self.unread[plan.step_id] = {page for work in plan.work for page in self.rows[work.row].pages}
        elapsed = self.costs.step + sum(
            work.count * self.costs.token + work.count * (work.start + work.count // 2) * self.costs.pair
            for work in plan.work
        )
        return ContentHandle(self, plan, tuple(r for r in results if r is not None), elapsed, scores)

    def _score(self, work: RowWork) -> PromptScores:
        row = self.rows[work.row]
        assert row.new.sampling.prompt_logprobs is not None and work.count <= PAGE_TOKENS
        end = min(work.start + work.count, row.new.prompt_tokens - 1)
        pairs = zip(row.numbers[work.start : end], row.tokens[work.start + 1 : end + 1], strict=True)
        return PromptScores(work.row, tuple(prompt_logprob(*pair) for pair in pairs))

    def _check_fresh(self, pages: Sequence[int], touched: set[int]) -> None:
        for page in pages:
            assert page != 0, "the null page was handed out"
            assert page not in touched, f"page {page} changes hands while a launched step uses it"
            self.pages[page] = [-1] * PAGE_TOKENS  # whatever was here must not be read again

    def _compute(self, row_id: int, start: int, count: int, samples: bool) -> RowResult | None:
        row = self.rows[row_id]
        assert count > 0
        assert start + count <= len(row.tokens), f"row {row_id} is to compute tokens that it does not have"
        for index in range(-(-start // PAGE_TOKENS)):
            begin = index * PAGE_TOKENS
            expected = row.numbers[begin : min(start, begin + PAGE_TOKENS)]
            found = self.pages[row.pages[index]][: len(expected)]
            assert row.tainted or found == expected, (
                f"row {row_id} ({row.new.request_id}) reads foreign content in page {index}"
            )
        for index in range(start // PAGE_TOKENS, (start + count - 1) // PAGE_TOKENS + 1):
            page = row.pages[index]
            assert sum(page in other.pages for other in self.rows.values()) == 1, f"page {page} is shared and written"
            begin, end = max(start, index * PAGE_TOKENS), min(start + count, (index + 1) * PAGE_TOKENS)
            base = index * PAGE_TOKENS
            self.pages[page][begin - base : end - base] = (
                [-2] * (end - begin) if row.tainted else row.numbers[begin:end]
            )
        assert samples == (start + count == len(row.tokens)), "a step samples exactly at the last token"
        if not samples:
            return None
        if row.new.request_id in self.fail_rows:
            row.tokens.append(0)
            row.numbers.append(mix(row.numbers[-1], 0))
            return RowResult(row_id, (), error="logits are NaN")
        token = sample(row.numbers[-1], len(row.tokens) - row.new.prompt_tokens, row.new.sampling)
        row.tokens.append(token)
        row.numbers.append(mix(row.numbers[-1], token))
        return RowResult(row_id, (token,))

    def close(self) -> None:
        self.closed = True


@dataclass
class ContentHandle:
    executor: ContentExecutor
    plan: StepPlan
    rows: tuple[RowResult, ...]
    elapsed_ns: int
    scores: tuple[PromptScores, ...] = ()

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        assert next(iter(self.executor.unread)) == self.plan.step_id, "results are read out of order"
        del self.executor.unread[self.plan.step_id]
        self.executor.clock.advance(self.elapsed_ns)
        if self.plan.step_id in self.executor.fail_steps:
            raise OSError("device lost")
        return StepResult(self.plan.step_id, self.rows, self.elapsed_ns, scores=self.scores)


KEY = salt_key("tests")


def make_request(
    name: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    stop: bool = True,
    min_tokens: int = 0,
    session: str | None = None,
    priority: int = 0,
    key: bytes = KEY,
    prompt_logprobs: int | None = None,
) -> EngineRequest:
    packed = pack_tokens(prompt)
    sampling = SamplingParams(
        max_tokens,
        min_tokens=min_tokens,
        temperature=0.0,
        stop_token_ids=(STOP_TOKEN,) if stop else (),
        prompt_logprobs=prompt_logprobs,
    )
    return EngineRequest(name, packed, page_hashes(packed, key), sampling, session, priority, key)


@dataclass
class Bench:
    """An engine on the content executor and a virtual clock, with every output checked against the oracle."""

    pages: int = 40
    rows: int = 8
    context: int = 4096
    scheduler: SchedulerConfig = field(default_factory=lambda: SchedulerConfig(expected_output_tokens=32))
    cache: CacheConfig = field(default_factory=CacheConfig)
    log: list[str] = field(default_factory=list)
    scores_prompts: bool = True

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        info = ExecutorInfo(
            self.rows, self.pages, 1 << 20, self.context, VOCAB + 1, "content", scores_prompts=self.scores_prompts
        )
        self.executor = ContentExecutor(info, self.clock)
        self.engine = Engine(self.executor, self.scheduler, self.cache, self.clock, self.log.append)
        self.requests: dict[str, EngineRequest] = {}
        self.outputs: dict[str, list[int]] = {}
        self.scores: dict[str, list[TokenLogprobs]] = {}
        self.finals: dict[str, RequestOutput] = {}
        self.steps = 0

    @property
    def limit(self) -> int:
        return min(self.context, (self.pages - 1) * PAGE_TOKENS)

    def add(self, request: EngineRequest) -> None:
        self.engine.add(request)
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        self.scores[request.request_id] = []

    def step(self) -> tuple[RequestOutput, ...]:
        self.steps += 1
        result = self.engine.step()
        self.engine.check_invariants()
        if result is None:
            return ()
        for output in result.outputs:
            name = output.request_id
            assert name not in self.finals, f"{name} has output after its end"
            assert not (output.prompt_logprobs and self.outputs[name]), f"{name} scores its prompt behind its answer"
            self.scores[name].extend(output.prompt_logprobs)
            self.outputs[name].extend(output.token_ids)
            if output.finish is not None:
                self.finals[name] = output
                self._check(output)
        return result.outputs

    def _check(self, final: RequestOutput) -> None:
        request = self.requests[final.request_id]
        tokens, reason = oracle(unpack_tokens(request.prompt), request.sampling, self.limit)
        got, scores = self.outputs[final.request_id], self.scores[final.request_id]
        prompt = unpack_tokens(request.prompt)
        known = list(map(prompt_logprob, prefix_numbers(prompt), prompt[1:]))
        wanted = known if request.sampling.prompt_logprobs is not None else []
        assert scores == wanted[: len(scores)]
        if final.finish in (FinishReason.ABORT, FinishReason.ERROR):
            assert got == tokens[: len(got)]
        else:
            assert (got, final.finish) == (tokens, reason)
            assert len(scores) == len(wanted)
            assert final.stop_token_id == (STOP_TOKEN if reason is FinishReason.STOP else None)

    def drain(self, most_steps: int = 100_000) -> None:
        """Step until idle; then nothing may be held."""
        for _ in range(most_steps):
            if not self.engine.has_work():
                break
            self.step()
        assert not self.engine.has_work(), "requests do not come to an end"
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.pages_used, stats.leak_faults) == (0, 0, 0, 0)
        assert set(self.finals) == set(self.requests)
        assert self.engine.step() is None

    def run_one(self, request: EngineRequest) -> RequestOutput:
        self.add(request)
        self.drain()
        return self.finals[request.request_id]


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
