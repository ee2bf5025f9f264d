"""A request's sampling parameters as the words that device kernels read (`kernels.sampling_table`)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longturn.engine.records import SamplingParams
from longturn.errors import RequestError
from longturn.kernels import sampling_table as words


@dataclass(frozen=True, slots=True)
class RowWords:
    """What the host writes to a row of a `SamplingTable` when the row is given to a request."""

    params: tuple[int, ...]
    """`ROW_WORDS` int32 words."""
    stop_ids: tuple[int, ...]
    """First entries of the row's `stop_ids`; the rest is not read."""
    bias_ids: tuple[int, ...]
    bias_values: tuple[float, ...]


def bits_of(value: float) -> int:
    """The int32 with the bits of an fp32."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return int(bits)


def signed(word: int) -> int:
    """The low 32 bits of `word` as an int32."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def needs_penalties(params: SamplingParams) -> bool:
    """Whether the row needs a penalty slot."""
    return bool(params.frequency_penalty or params.presence_penalty) or params.repetition_penalty != 1.0


def plain(params: SamplingParams) -> bool:
    """A temperature is all that the row asks for: `sample_rows` may be captured with `full=False`."""
    bans = params.min_tokens > 0 and bool(params.stop_token_ids)
    truncates = params.temperature > 0.0 and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
    return not (truncates or bans or params.logprobs is not None or needs_penalties(params) or bool(params.logit_bias))


def row_words(params: SamplingParams, prompt_tokens: int, penalty_slot: int = -1) -> RowWords:
    """Words of a row. `penalty_slot` is -1 unless `needs_penalties`.

    Raises:
        RequestError: more biases, or more stop tokens together with min_tokens, than a row holds.
    """
    bans = params.min_tokens > 0 and bool(params.stop_token_ids)
    stops = params.stop_token_ids if bans else ()
    if len(params.logit_bias) > words.MAX_BIASES:
        raise RequestError(f"logit_bias may name at most {words.MAX_BIASES} tokens on a GPU", param="logit_bias")
    if len(stops) > words.MAX_STOPS:
        raise RequestError(
            f"min_tokens works with at most {words.MAX_STOPS} stop tokens on a GPU, not {len(stops)}",
            param="stop_token_ids",
        )
    row = [0] * words.ROW_WORDS
    row[words.TEMPERATURE] = bits_of(params.temperature)
    row[words.TOP_K] = min(params.top_k, (1 << 31) - 1)
    row[words.TOP_P] = bits_of(params.top_p)
    row[words.MIN_P] = bits_of(params.min_p)
    row[words.SEED_LOW] = signed(params.seed)
    row[words.SEED_HIGH] = signed(params.seed >> 32)
    row[words.FREQUENCY] = bits_of(params.frequency_penalty)
    row[words.PRESENCE] = bits_of(params.presence_penalty)
    row[words.REPETITION] = bits_of(params.repetition_penalty)
    row[words.STOP_FROM] = prompt_tokens + params.min_tokens if bans else 0
    row[words.STOPS] = len(stops)
    row[words.BIASES] = len(params.logit_bias)
    row[words.PENALTY_SLOT] = penalty_slot
    row[words.LOGPROBS] = 0 if params.logprobs is None else 1 + min(params.logprobs, words.MAX_LOGPROBS)
    return RowWords(
        tuple(row), stops, tuple(i for i, _ in params.logit_bias), tuple(value for _, value in params.logit_bias)
    )


def penalty_words(tokens: npt.NDArray[np.int32], prompt_tokens: int, vocab: int) -> npt.NDArray[np.int32]:
    """int32 [vocab]: contents of a penalty slot for a sequence whose `tokens` (prompt, then output) are known."""
    result = np.bincount(tokens[prompt_tokens:], minlength=vocab).astype(np.int32)
    result[tokens[:prompt_tokens]] |= words.IN_PROMPT
    return result
