"""Choosing the next token of one sequence from its logits (numpy, for the CPU executor).

A draw depends on (seed, position, logits) alone, never on the batch: every token gets an exponential random number
hashed from seed, position and its own id, and the least ratio of that number to the token's weight wins (an exponential
race; the token i wins with probability weight_i / sum of weights). So a request samples the same tokens alone, in a
batch, and resumed after preemption; where arithmetic differs in the last bits, as on a GPU, only near-ties can change,
while a lookup in the cumulative distribution would shift with every rounding before it.

A grammar's mask comes before everything, so what is not allowed never counts. Truncation follows Hugging Face's order:
penalties, temperature, top-k, top-p (on what top-k left), min-p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from longturn.engine.records import SamplingParams, TokenLogprobs
from longturn.executor.grammar import GrammarRow

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_MASK = (1 << 64) - 1


class NonFiniteLogits(ValueError):
    """The model produced NaN or no finite logit at all."""


@dataclass(slots=True)
class SamplingState:
    """What sampling remembers of one sequence: its parameters and, where penalties need them, token counts."""

    params: SamplingParams
    generated: int = 0
    """Tokens generated so far."""
    output_counts: npt.NDArray[np.int32] | None = None
    """[vocab] how often each token was generated; only with frequency or presence penalty."""
    seen: npt.NDArray[np.bool_] | None = None
    """[vocab] tokens of prompt and output; only with a repetition penalty."""
    bias_ids: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    bias_values: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    grammar: GrammarRow | None = None
    """Where the sequence stands in its grammar."""

    @classmethod
    def create(
        cls,
        params: SamplingParams,
        tokens: npt.NDArray[np.int32],
        prompt_tokens: int,
        vocab: int,
        grammar: GrammarRow | None = None,
    ) -> SamplingState:
        """State of a sequence whose `tokens` (prompt, then output) are known; a resumed sequence starts right.

        `grammar` has been led through the output.
        """
        state = cls(params, generated=len(tokens) - prompt_tokens, grammar=grammar)
        if params.frequency_penalty or params.presence_penalty:
            state.output_counts = np.bincount(tokens[prompt_tokens:], minlength=vocab).astype(np.int32)
        if params.repetition_penalty != 1.0:
            state.seen = np.zeros(vocab, np.bool_)
            state.seen[tokens] = True
        if params.logit_bias:
            state.bias_ids = np.array([i for i, _ in params.logit_bias], np.int64)
            state.bias_values = np.array([v for _, v in params.logit_bias], np.float32)
        return state

    def append(self, token: int) -> None:
        """Record a sampled token."""
        self.generated += 1
        if self.grammar is not None:
            self.grammar.advance(token)
        if self.output_counts is not None:
            self.output_counts[token] += 1
        if self.seen is not None:
            self.seen[token] = True

    @property
    def plain_greedy(self) -> bool:
        """Only the index of the largest raw logit is needed."""
        p = self.params
        return (
            p.temperature == 0.0
            and p.logprobs is None
            and self.output_counts is None
            and self.seen is None
            and not p.logit_bias
            and not self.must_not_stop
            and self.grammar is None
        )

    @property
    def must_not_stop(self) -> bool:
        return self.generated < self.params.min_tokens and bool(self.params.stop_token_ids)


def uniforms(seed: int, position: int, ids: npt.NDArray[np.uint32]) -> Doubles:
    """Random numbers in (0, 1), one for each token id, from (seed, position, id).

    Seed and position are mixed by the splitmix64 finaliser (Steele, Lea, Flood 2014), ids by murmur3's 32-bit one.
    """
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D) & _MASK
    for _ in range(2):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        x = ((x ^ (x >> 31)) + 0x9E3779B97F4A7C15) & _MASK
    h = ids * np.uint32(0x9E3779B1)
    for key in (x & 0xFFFFFFFF, x >> 32):
        h ^= np.uint32(key)
        h ^= h >> np.uint32(16)
        h *= np.uint32(0x85EBCA6B)
        h ^= h >> np.uint32(13)
        h *= np.uint32(0xC2B2AE35)
        h ^= h >> np.uint32(16)
    result: Doubles = (h.astype(np.float64) + 0.5) * 2.0**-32
    return result


def race(weights: Doubles, numbers: Doubles) -> int:
    """Index of the largest weight / -log(1 - u), u from `uniforms`: index i with probability weight_i / sum.

    -log(1 - u) is at least u, so weight / u is an upper bound that needs no logarithm: the few indices whose bound
    reaches the exact value of the best bound are all that can win.
    """
    bounds = weights / numbers
    first = int(bounds.argmax())
    reached = weights[first] / -math.log1p(-float(numbers[first]))
    rivals = np.flatnonzero(bounds >= reached)
    return int(rivals[(weights[rivals] / -np.log1p(-numbers[rivals])).argmax()])


def sample(logits: Floats, state: SamplingState, position: int) -> tuple[int, TokenLogprobs | None]:
    """Choose the token at `position` (its index in the sequence).

    Args:
        logits: [vocab] float32; not modified.
        state: the sequence's sampling state; the caller records the token with `append`.

    Returns:
        The token id, and log-probabilities of the raw distribution if the request asked for them.

    Raises:
        NonFiniteLogits: NaN among the logits, or nothing left to choose from.
        GrammarError: the sequence's grammar cannot be followed.
    """
    params = state.params
    top = float(logits.max())
    if not math.isfinite(top):
        raise NonFiniteLogits(f"the model produced a largest logit of {top}")
    allowed = None if state.grammar is None else _allowed(state.grammar, len(logits))
    adjusted = _adjust(logits if allowed is None else np.where(allowed, logits, np.float32(-np.inf)), state, allowed)
    if params.temperature == 0.0:
        token = int(adjusted.argmax())
        if allowed is not None and not allowed[token]:
            raise NonFiniteLogits("every token that the grammar allows is ruled out")
    else:
        token = _draw(adjusted, params, position)
    if params.logprobs is None:
        return token, None
    return token, logprobs_of(logits, token, params.logprobs)


def _allowed(grammar: GrammarRow, vocab: int) -> Bools:
    """[vocab] tokens that the grammar allows next."""
    bits = np.unpackbits(grammar.mask().astype("<i4", copy=False).view(np.uint8), count=vocab, bitorder="little")
    return bits.view(np.bool_)


def _adjust(logits: Floats, state: SamplingState, allowed: Bools | None) -> Floats:
    """Penalties, bias and the ban on stop tokens, on a copy where anything changes.

    A grammar that has ended allows nothing but stop tokens: then `min_tokens` must not take those away.
    """
    params = state.params
    touched = state.output_counts is not None or state.seen is not None or len(state.bias_ids) > 0
    if not touched and not state.must_not_stop:
        return logits
    out = logits.copy()
    if state.seen is not None:
        penalised = out[state.seen]
        factor = np.float32(params.repetition_penalty)
        out[state.seen] = np.where(penalised > 0, penalised / factor, penalised * factor)
    if state.output_counts is not None:
        counts = state.output_counts
        out -= np.float32(params.frequency_penalty) * counts
        out -= np.float32(params.presence_penalty) * (counts > 0)
    if len(state.bias_ids):
        np.add.at(out, state.bias_ids, state.bias_values)
    if state.must_not_stop:
        stops = list(params.stop_token_ids)
        if allowed is None or np.count_nonzero(allowed) > np.count_nonzero(allowed[stops]):
            out[stops] = -np.inf
    return out


def _draw(logits: Floats, params: SamplingParams, position: int) -> int:
    top = float(logits.max())
    if not math.isfinite(top):
        raise NonFiniteLogits("every token is ruled out")
    # Tiny temperatures are argmax; dividing by them would overflow.
    weights = np.exp((logits.astype(np.float64) - top) / max(params.temperature, 1e-6))
    if not (params.top_k or params.top_p < 1.0 or params.min_p > 0.0):
        return race(weights, uniforms(params.seed, position, np.arange(len(weights), dtype=np.uint32)))
    ids = _truncate(weights, params)
    return int(ids[race(weights[ids], uniforms(params.seed, position, ids.astype(np.uint32)))])


def _truncate(weights: Doubles, params: SamplingParams) -> Ints:
    """Ids that survive top-k, top-p and min-p, most likely first (equal weights: lower id first).

    Sorting a whole vocabulary would cost more than the rest of sampling. All tokens above a threshold are more likely
    than all below it, so sorting those alone is exact as soon as they hold enough tokens (top-k) and mass (top-p).
    """
    vocab = len(weights)
    k = min(params.top_k, vocab) if params.top_k else vocab
    total = float(weights.sum())
    # Nothing below min_p survives; only the mass that top-p renormalises after top-k may lie lower.
    floor = params.min_p if params.top_p >= 1.0 or not params.top_k else 0.0
    threshold = max(params.min_p, 1e-4)
    while True:
        candidates = np.flatnonzero(weights >= threshold)
        if params.top_k:
            enough = len(candidates) >= k
        else:
            enough = float(weights[candidates].sum()) >= params.top_p * total
        if enough or threshold <= floor:
            break
        threshold = max(threshold * 1e-4 if threshold > 1e-30 else 0.0, floor)
    ids = candidates[np.argsort(-weights[candidates], kind="stable")][:k]
    sorted_weights = weights[ids]
    if params.top_p < 1.0:
        mass = float(sorted_weights.sum()) if params.top_k else total
        before = np.cumsum(sorted_weights) - sorted_weights
        ids = ids[: max(1, int(np.count_nonzero(before < params.top_p * mass)))]
    if params.min_p > 0.0:
        keep = weights[ids] >= params.min_p
        keep[0] = True
        ids = ids[keep]
    return ids


def score(logits: Floats, token: int, count: int) -> TokenLogprobs:
    """As `logprobs_of`, of a token that was not sampled, with its rank; NaN where the logits are no numbers.

    Of equally likely tokens each has the rank of the first.
    """
    if not math.isfinite(float(logits.max())):
        return TokenLogprobs(math.nan)
    return replace(logprobs_of(logits, token, count), rank=int(np.count_nonzero(logits > logits[token])) + 1)


def logprobs_of(logits: Floats, token: int, count: int) -> TokenLogprobs:
    """Natural-log probabilities of the raw distribution: of `token` and of the `count` most likely tokens."""
    top = float(logits.max())
    log_total = top + math.log(float(np.exp(logits.astype(np.float64) - top).sum()))
    ids: Sequence[int] = ()
    if count:
        part = np.argpartition(-logits, count - 1)[:count]
        ids = part[np.lexsort((part, -logits[part]))].tolist()
    return TokenLogprobs(
        token=float(logits[token]) - log_total,
        top_ids=tuple(ids),
        top=tuple(float(logits[i]) - log_total for i in ids),
    )
