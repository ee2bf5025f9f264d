"""Two configurations of a model in this process, step by step beside each other.

Both models stay loaded, and each chunk's logits are compared as soon as both have them: logits of a whole text would
take gigabytes. The steps are those of the executor's own interface, so what is measured is what is served.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from longturn.assemble import build_cpu_model
from longturn.bench.quality import AnswerPair, PositionScores, compare_logits, join_scores
from longturn.bench.texts import NamedText
from longturn.config import PAGE_TOKENS, EngineConfig
from longturn.errors import ConfigError, LongturnError
from longturn.executor.cpu import CpuModel
from longturn.executor.rows import StepInputs
from longturn.frontend.chat_template import ChatTemplates
from longturn.frontend.records import ChatPrompt
from longturn.frontend.tokenizer import Tokenizer, load_tokenizer
from longturn.source import ModelSource, resolve_source

CHUNK_TOKENS = 64
"""Positions whose logits exist at once: 50 MB for each model with a vocabulary of 200,000."""
PREFILL_TOKENS = 512
_PROBE = "def f(x):  # Grüße, 1234\n\treturn x\n"
"""Tokenizers that cut this alike are taken for the same."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    texts: tuple[NamedText, ...]
    prompts: tuple[NamedText, ...]
    positions: int
    """Most positions of all texts together, shared between them as evenly as their lengths allow."""
    window_tokens: int
    answer_tokens: int


@dataclass
class Outcome:
    """What has been measured; less than planned if it was interrupted."""

    texts: dict[str, PositionScores] = field(default_factory=dict)
    answers: list[AnswerPair] = field(default_factory=list)
    interrupted: bool = False


class Watcher(Protocol):
    """Told how far the measurement is."""

    def waiting(self, text: str) -> None: ...

    def tick(self) -> None: ...


class Pair:
    """The reference and the candidate, loaded. `close` gives their memory back."""

    def __init__(self, reference: EngineConfig, candidate: EngineConfig) -> None:
        """
        Raises:
            ModelError: a model is missing, damaged or not supported.
            ConfigError: settings contradict each other, or the two have different vocabularies.
        """
        self.source, other = resolve_source(reference.model), resolve_source(candidate.model)
        if self.source.vocab_size != other.vocab_size:
            raise ConfigError(
                f"vocabularies of {self.source.vocab_size} and {other.vocab_size} tokens: the models cannot be compared"
            )
        self.tokenizer = load_tokenizer(self.source)
        if other.path != self.source.path and self.tokenizer.encode(_PROBE) != load_tokenizer(other).encode(_PROBE):
            raise ConfigError(f"{self.source.path} and {other.path} have different tokenizers")
        self._templates = ChatTemplates.of(self.tokenizer)
        self._ends = _end_tokens(self.source, self.tokenizer)
        self.reference = build_cpu_model(reference)
        try:
            self.candidate = build_cpu_model(candidate)
        except BaseException:
            self.reference.close()
            raise

    def close(self) -> None:
        self.reference.close()
        self.candidate.close()

    @property
    def context_tokens(self) -> int:
        """Longest sequence that both can compute."""
        return min(self.reference.max_context_tokens, self.candidate.max_context_tokens)

    def measure(self, plan: Plan, watcher: Watcher) -> Outcome:
        """Run texts, then prompts. Ctrl-C ends it early and keeps what is whole.

        Raises:
            ConfigError: a window or a prompt with its answer is longer than the context, or no text has two tokens.
            LongturnError: a model gives logits that are not finite.
        """
        if plan.window_tokens > self.context_tokens:
            raise ConfigError(f"--window {plan.window_tokens} is more than the context of {self.context_tokens} tokens")
        windows = self._windows(plan)
        prompts = [(prompt.name, self._prompt_tokens(prompt, plan.answer_tokens)) for prompt in plan.prompts]
        outcome = Outcome()
        try:
            for name, sequences in windows:
                watcher.waiting(f"text {name}")
                parts: list[PositionScores] = []
                try:
                    for tokens in sequences:
                        for scores in self._score(tokens):
                            parts.append(scores)
                            watcher.tick()
                finally:
                    outcome.texts[name] = join_scores(parts)
            if prompts:
                watcher.waiting(f"{len(prompts)} prompts")
                first, second = (
                    greedy_answers(model, [tokens for _, tokens in prompts], plan.answer_tokens, self._ends)
                    for model in (self.reference, self.candidate)
                )
                for (name, tokens), a, b in zip(prompts, first, second, strict=True):
                    outcome.answers.append(AnswerPair(name, len(tokens), tuple(a), tuple(b)))
        except KeyboardInterrupt:
            outcome.interrupted = True
        return outcome

    def _windows(self, plan: Plan) -> list[tuple[str, list[list[int]]]]:
        head = _head(self.tokenizer)
        body = max(plan.window_tokens - len(head), 1)
        cut: list[tuple[str, list[list[int]]]] = []
        for text in plan.texts:
            ids = self.tokenizer.encode(text.text)
            cut.append((text.name, [head + ids[at : at + body] for at in range(0, len(ids), body)]))
        shares = fair_shares([sum(len(s) - 1 for s in sequences) for _, sequences in cut], plan.positions)
        chosen = [(name, _first(sequences, share)) for (name, sequences), share in zip(cut, shares, strict=True)]
        if not any(sequences for _, sequences in chosen):
            raise ConfigError("no text has two tokens: nothing to predict")
        return [(name, sequences) for name, sequences in chosen if sequences]

    def _score(self, tokens: list[int]) -> Iterator[PositionScores]:
        """Scores of one sequence, chunk by chunk: every token but the last predicts its successor."""
        table = _page_tables(1, len(tokens))
        ids = np.array(tokens, np.int32)
        for begin in range(0, len(ids) - 1, CHUNK_TOKENS):
            end = min(begin + CHUNK_TOKENS, len(ids) - 1)
            step = _one_row(ids[begin:end], begin, 0, table, np.arange(end - begin, dtype=np.int32))
            # The arrays are valid until the model's next call, which comes after the comparison.
            yield compare_logits(self.reference.logits(step), self.candidate.logits(step), ids[begin + 1 : end + 1])

    def _prompt_tokens(self, prompt: NamedText, answer_tokens: int) -> list[int]:
        """As the server would have it: through the chat template if the model has one."""
        if self.tokenizer.settings.chat_templates:
            message = {"role": "user", "content": prompt.text}
            ids = self.tokenizer.encode(self._templates.render(ChatPrompt((message,), ())))
        else:
            ids = self.tokenizer.encode(prompt.text, add_special_tokens=True)
        if not ids or len(ids) + answer_tokens > self.context_tokens:
            raise ConfigError(
                f"prompt '{prompt.name}' of {len(ids)} tokens and an answer of {answer_tokens} do not fit into the "
                f"context of {self.context_tokens}"
            )
        return ids


def fair_shares(lengths: Sequence[int], total: int) -> list[int]:
    """How much of each item to take for `total` in all: short items whole, the others alike."""
    shares = [0] * len(lengths)
    left = total
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    for done, index in enumerate(order):
        shares[index] = min(lengths[index], left // (len(order) - done))
        left -= shares[index]
    return shares


def _first(sequences: list[list[int]], positions: int) -> list[list[int]]:
    """As many sequences, the last one cut, as have this many positions with a successor."""
    chosen = []
    for tokens in sequences:
        count = min(len(tokens) - 1, positions)
        if count > 0:
            chosen.append(tokens[: count + 1])
            positions -= count
    return chosen


def _head(tokenizer: Tokenizer) -> list[int]:
    """The token that starts a text, for models that were trained with one."""
    bos = tokenizer.bos_id
    return [bos] if bos is not None and bos in tokenizer.encode("", add_special_tokens=True) else []


def _end_tokens(source: ModelSource, tokenizer: Tokenizer) -> frozenset[int]:
    ends = set(source.eos_token_ids)
    return frozenset(ends if tokenizer.eos_id is None else ends | {tokenizer.eos_id})


# --- greedy answers --------------------------------------------------------------------------------------------------


def greedy_answers(
    model: CpuModel, prompts: Sequence[Sequence[int]], most_tokens: int, ends: frozenset[int]
) -> list[list[int]]:
    """The most likely token again and again, until an end token (which is kept) or `most_tokens`.

    Prompts are computed together, as many at once as the page pool holds.

    Raises:
        ConfigError: the pool does not hold one of them.
        LongturnError: the model gives NaN logits.
    """
    longest = max(len(prompt) for prompt in prompts) + most_tokens
    together = (model.pages - 1) // -(-longest // PAGE_TOKENS)
    if not together:
        raise ConfigError(f"cache.memory_bytes holds less than one sequence of {longest} tokens")
    answers: list[list[int]] = []
    for at in range(0, len(prompts), together):
        answers += _answer_group(model, prompts[at : at + together], most_tokens, ends, longest)
    return answers


def _answer_group(
    model: CpuModel, prompts: Sequence[Sequence[int]], most_tokens: int, ends: frozenset[int], longest: int
) -> list[list[int]]:
    tables = _page_tables(len(prompts), longest)
    answers = [[_prefill(model, np.array(prompt, np.int32), row, tables)] for row, prompt in enumerate(prompts)]
    while rows := [r for r, answer in enumerate(answers) if answer[-1] not in ends and len(answer) < most_tokens]:
        step = StepInputs(
            tokens=np.array([answers[row][-1] for row in rows], np.int32),
            positions=np.array([len(prompts[row]) + len(answers[row]) - 1 for row in rows], np.int32),
            query_starts=np.arange(len(rows) + 1, dtype=np.int32),
            rows=np.array(rows, np.int32),
            page_tables=tables,
            sample_index=np.arange(len(rows), dtype=np.int32),
        )
        for row, token in zip(rows, model.greedy(step), strict=True):
            answers[row].append(_known(int(token)))
    return answers


def _prefill(model: CpuModel, ids: npt.NDArray[np.int32], row: int, tables: npt.NDArray[np.int32]) -> int:
    """The first token of the answer."""
    token = -1
    for begin in range(0, len(ids), PREFILL_TOKENS):
        chunk = ids[begin : begin + PREFILL_TOKENS]
        step = _one_row(chunk, begin, row, tables, np.array([len(chunk) - 1], np.int32))
        token = int(model.greedy(step)[0])
    return _known(token)


def _known(token: int) -> int:
    if token < 0:
        raise LongturnError("the model produced NaN logits")
    return token


def _one_row(
    tokens: npt.NDArray[np.int32],
    start: int,
    row: int,
    tables: npt.NDArray[np.int32],
    sample_index: npt.NDArray[np.int32],
) -> StepInputs:
    return StepInputs(
        tokens=tokens,
        positions=np.arange(start, start + len(tokens), dtype=np.int32),
        query_starts=np.array([0, len(tokens)], np.int32),
        rows=np.array([row], np.int32),
        page_tables=tables,
        sample_index=sample_index,
    )


def _page_tables(rows: int, tokens: int) -> npt.NDArray[np.int32]:
    """Pages of their own for each row; page 0 is the null page."""
    pages = -(-tokens // PAGE_TOKENS)
    return np.arange(1, rows * pages + 1, dtype=np.int32).reshape(rows, pages)
