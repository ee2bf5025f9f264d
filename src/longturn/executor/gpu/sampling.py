"""How rows sample, as the device keeps it, and what comes back of a step's samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longturn.engine.records import RowResult, SamplingParams, TokenLogprobs, decode_results
from longturn.errors import RequestError
from longturn.executor.grammar import GrammarRow, Grammars
from longturn.executor.sampling_words import RowWords, needs_penalties, penalty_words, plain, row_words
from longturn.kernels.sampling_table import MAX_LOGPROBS, Sampled

Int32 = npt.NDArray[np.int32]
Words = TypeVar("Words", Tensor, Int32)
_WORDS = 2 + 2 * MAX_LOGPROBS
"""Of one sample: token, its log-probability, most likely tokens, theirs."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """A row's parameters on the host's side. Each row has the penalty slot of its own number."""

    words: RowWords
    logprobs: int | None
    penalties: Int32 | None
    """Contents of the row's penalty slot, if it needs one."""
    plain: bool
    """Only the token is wanted back."""
    light: bool
    """A temperature is all that it samples with."""
    grammar: GrammarRow | None
    """Where the row stands in its grammar."""
    error: str | None
    """The device cannot sample so: the row fails at its first token, and no other with it."""

    @staticmethod
    def of(
        row: int, params: SamplingParams, tokens: Int32, prompt_tokens: int, vocab: int, grammars: Grammars | None
    ) -> RowSampling:
        """For a row whose `tokens` (prompt, then output) are known; waits for its grammar to be compiled."""
        wanted = needs_penalties(params)
        try:
            words = row_words(params, prompt_tokens, row if wanted else -1)
        except RequestError as error:
            greedy = row_words(SamplingParams(1, temperature=0.0), prompt_tokens)
            return RowSampling(greedy, None, None, False, True, None, str(error))
        if params.grammar is not None and grammars is None:
            return RowSampling(words, None, None, False, False, None, "this executor has no grammars")
        grammar = None
        if params.grammar is not None and grammars is not None:
            grammar = grammars.row(params.grammar, tokens[prompt_tokens:].tolist())
        penalties = penalty_words(tokens, prompt_tokens, vocab) if wanted else None
        light = plain(params) and grammar is None
        return RowSampling(words, params.logprobs, penalties, params.logprobs is None, light, grammar, None)


class SampleResults:
    """What the steps in flight have sampled, in memory of the host that kernels write to: a copy back would cost a step
    more than all of its other ends together, since the copy engine and the kernels wait for each other."""

    def __init__(self, samples: int, turns: int, turn: Tensor, device: torch.device) -> None:
        """
        Args:
            samples: of a step at most.
            turns: steps that may be in flight.
            turn: int32 on the device: its first word says whose turn it is.
            device: of the kernels.
        """
        there = torch.device("cpu") if device.type == "cuda" else device
        shape = (turns, samples * _WORDS)
        self.words = torch.zeros(shape, dtype=torch.int32, device=there, pin_memory=device.type == "cuda")
        """int32 [turns, words of a step]."""
        parts = _split(self.words[0], samples)
        self._sampled = Sampled(
            parts[0], parts[1].view(torch.float32), parts[2].view(samples, -1),
            parts[3].view(torch.float32).view(samples, -1), turn, self.words.stride(0),
        )  # fmt: skip

    def first(self, samples: int) -> Sampled:
        """Entries 0 .. samples - 1."""
        s = self._sampled
        parts = (s.tokens[:samples], s.logprobs[:samples], s.top_ids[:samples], s.top_logprobs[:samples])
        return Sampled(*parts, s.turn, s.turn_words)


def row_results(words: Int32, rows: list[tuple[int, RowSampling]], plain: bool) -> tuple[RowResult, ...]:
    """The results of samples 0, 1, .. from a step's words of `SampleResults`; `plain` if only tokens are wanted."""
    tokens = words[: len(rows)].tolist()
    if plain and min(tokens, default=0) >= 0:
        return decode_results([row for row, _ in rows], tokens)
    return tuple(
        _row_result(row, token, sampling, words, sample)
        for sample, (token, (row, sampling)) in enumerate(zip(tokens, rows, strict=True))
    )


def _row_result(row: int, token: int, sampling: RowSampling, words: Int32, sample: int) -> RowResult:
    if sampling.error is not None:
        return RowResult(row, (), error=sampling.error)
    if token < 0:
        return RowResult(row, (), error="the model produced NaN logits, or every token is ruled out")
    if sampling.logprobs is None:
        return RowResult(row, (token,))
    samples = len(words) // _WORDS
    _, logprobs, ids, tops = _split(words, samples)
    at = slice(sample * MAX_LOGPROBS, sample * MAX_LOGPROBS + min(sampling.logprobs, MAX_LOGPROBS))
    found = TokenLogprobs(
        token=float(logprobs.view(np.float32)[sample]),
        top_ids=tuple(ids[at].tolist()),
        top=tuple(tops.view(np.float32)[at].tolist()),
    )
    return RowResult(row, (token,), (found,))


def _split(words: Words, samples: int) -> tuple[Words, Words, Words, Words]:
    """Tokens, log-probabilities, ids and log-probabilities of the most likely."""
    ends = (samples, 2 * samples, (2 + MAX_LOGPROBS) * samples)
    return words[: ends[0]], words[ends[0] : ends[1]], words[ends[1] : ends[2]], words[ends[2] :]
