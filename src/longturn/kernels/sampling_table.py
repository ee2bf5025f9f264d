"""What sampling on the device knows of each row: words that the host writes when a row is given to a request, and the
scratch and outputs of a step.

A row's parameters are int32 words, floats bit-cast, so that they travel in the same scattered copy as everything else
of a step. `PENALTY_SLOT` points into `SamplingTable.penalties`, which only rows with a penalty need: a slot is one word
for each token of the vocabulary, the number of times it was generated plus `IN_PROMPT` if the prompt holds it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED_LOW, SEED_HIGH, FREQUENCY, PRESENCE, REPETITION = range(9)
"""Floats are bit-cast; top_k 0 keeps all; the seed's 64 bits are split in two words."""
STOP_FROM = 9
"""Position from which stop tokens may be sampled: prompt tokens + min_tokens; 0 where there is no ban."""
STOPS, BIASES = 10, 11
"""Used entries of the row's `stop_ids` and `bias_ids`."""
PENALTY_SLOT = 12
"""Slot of `penalties`, -1 for none."""
LOGPROBS = 13
"""0: no log-probabilities; n + 1: those of the sampled token and of the n most likely ones."""
ROW_WORDS = 16

MAX_STOPS = 32
MAX_BIASES = 1024
MAX_LOGPROBS = 20
IN_PROMPT = 1 << 30
"""Bit of a penalty word: the token is in the prompt."""


@dataclass(frozen=True)
class SamplingTable:
    """Sampling state of all rows of an executor, on the device."""

    params: Tensor
    """int32 [rows, ROW_WORDS]."""
    stop_ids: Tensor
    """int32 [rows, MAX_STOPS]: tokens banned before position STOP_FROM."""
    bias_ids: Tensor
    """int32 [rows, MAX_BIASES], and the values added to their logits (an id may come twice)."""
    bias_values: Tensor
    """fp32 [rows, MAX_BIASES]."""
    penalties: Tensor
    """int32 [slots, vocab], see PENALTY_SLOT. `sample_rows` counts the tokens it samples."""

    @staticmethod
    def allocate(rows: int, vocab: int, slots: int, device: torch.device) -> SamplingTable:
        """A table whose rows are greedy; at least one slot is allocated, since kernels need an address."""

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        params = ints(rows, ROW_WORDS)
        params[:, PENALTY_SLOT] = -1
        biases = torch.zeros(rows, MAX_BIASES, dtype=torch.float32, device=device)
        return SamplingTable(params, ints(rows, MAX_STOPS), ints(rows, MAX_BIASES), biases, ints(max(slots, 1), vocab))


@dataclass(frozen=True)
class SamplePlan:
    """How a row's vocabulary is dealt out: programs a row, and the most likely tokens each offers for truncation."""

    parts: int = 64
    width: int = 64
    warps: int = 8
    finish_warps: int = 16
    block: int = 8192
    """Tokens a pass over the whole row takes at a time."""

    @staticmethod
    def default(samples: int, full: bool = True) -> SamplePlan:
        """A plan for `samples` rows and `full` of `sample_rows`, as measured at 1, 8 and 64 (docs/performance.md)."""
        if samples <= 4 or not full:
            return SamplePlan(parts=128, width=32, warps=4)
        return SamplePlan(warps=4)

    def tile(self, vocab: int) -> int:
        """Tokens of one program, a power of two."""
        runs = -(-vocab // RUN)
        return 1 << (-(-runs // self.parts) * RUN - 1).bit_length()


RUN = 16
"""Neighbouring tokens that one program takes; the next 16 are the next program's. Likely tokens have low ids, and so
spread over all programs."""
FIELDS = 6


@dataclass(frozen=True)
class SampleScratch:
    """Buffers of one step."""

    floats: Tensor
    """fp32 [S, FIELDS, parts]: see the fields in sampling_common.py."""
    indices: Tensor
    """int32 [S, 2, parts]: best token of a part, and how many candidates it offers."""
    values: Tensor
    """fp32 [S, parts, width] logits of candidates, and their ids."""
    ids: Tensor
    """int32 [S, parts, width]."""
    adjusted: Tensor
    """fp32 [S, vocab]: logits after penalties, of rows that truncate."""
    top_values: Tensor
    """fp32 [S, parts, 32] most likely tokens of a part, and their ids; for log-probabilities."""
    top_ids: Tensor
    """int32 [S, parts, 32]."""

    @staticmethod
    def allocate(samples: int, vocab: int, plan: SamplePlan, device: torch.device) -> SampleScratch:
        """Uninitialised buffers for `samples` rows of logits."""

        def floats(*shape: int) -> Tensor:
            return torch.empty(samples, *shape, dtype=torch.float32, device=device)

        def ints(*shape: int) -> Tensor:
            return torch.empty(samples, *shape, dtype=torch.int32, device=device)

        return SampleScratch(
            floats(FIELDS, plan.parts), ints(2, plan.parts), floats(plan.parts, plan.width),
            ints(plan.parts, plan.width), floats(vocab), floats(plan.parts, 32), ints(plan.parts, 32),
        )  # fmt: skip


@dataclass(frozen=True)
class Sampled:
    """What a step sampled; entry s belongs to row s of its logits. Entries of padding are not written."""

    tokens: Tensor
    """int32 [S]; -1 where the logits held NaN, or no token was left to choose from."""
    logprobs: Tensor
    """fp32 [S]: natural-log probability of the token in the raw distribution; of rows that asked."""
    top_ids: Tensor
    """int32 [S, MAX_LOGPROBS]: most likely tokens, as many as the row asked for, likeliest first (equal: lower id
    first); -1 where no token has a probability."""
    top_logprobs: Tensor
    """fp32 [S, MAX_LOGPROBS]."""
    turn: Tensor | None = None
    """int32 on the logits' device, whose first word says which of several such results is written; None: this one."""
    turn_words: int = 0
    """From one of them to the next, in each of the four."""

    @staticmethod
    def allocate(samples: int, device: torch.device) -> Sampled:
        """Uninitialised buffers for `samples` rows of logits."""
        return Sampled(
            torch.empty(samples, dtype=torch.int32, device=device),
            torch.empty(samples, dtype=torch.float32, device=device),
            torch.empty(samples, MAX_LOGPROBS, dtype=torch.int32, device=device),
            torch.empty(samples, MAX_LOGPROBS, dtype=torch.float32, device=device),
        )
