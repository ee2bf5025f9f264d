"""What a request may ask for. Every refusal names the field and the value."""

from __future__ import annotations

import math
from dataclasses import dataclass

from longturn.engine.records import SamplingParams
from longturn.errors import RequestError
from longturn.frontend.records import ChatPrompt, TextRequest

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What of a model bounds a request."""

    max_context_tokens: int
    """Prompt and output together."""
    vocab_size: int
    """Rows of the output head: token ids are below it."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer unless a request ignores them."""


def check_request(request: TextRequest, limits: ModelLimits) -> None:
    """
    Raises:
        RequestError: a value is out of range; `param` has the field's name.
    """
    check_sampling(request.sampling, limits)
    if len(request.stop) > MAX_STOPS:
        raise RequestError(f"stop may have at most {MAX_STOPS} strings, not {len(request.stop)}", param="stop")
    for stop in request.stop:
        if not stop:
            raise RequestError("stop must not hold an empty string", param="stop")
        if len(stop) > MAX_STOP_CHARS:
            raise RequestError(f"a stop string may have at most {MAX_STOP_CHARS} characters", param="stop")
    if request.grammar is not None and not limits.eos_token_ids:
        raise RequestError(
            "constrained output needs a model with an end token", param=request.grammar.param, code="unsupported_value"
        )
    if request.allowed_token_ids is not None:
        if not request.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty", param="allowed_token_ids")
        if not limits.eos_token_ids:
            raise RequestError("allowed_token_ids needs a model with an end token", param="allowed_token_ids")
        for token_id in request.allowed_token_ids:
            _token("allowed_token_ids", token_id, limits.vocab_size)
    if isinstance(request.prompt, ChatPrompt) and not request.prompt.messages:
        raise RequestError("messages must not be empty", param="messages")


def check_sampling(sampling: SamplingParams, limits: ModelLimits) -> None:
    """
    Raises:
        RequestError: as `check_request`.
    """
    _between("temperature", sampling.temperature, 0, 2)
    _between("top_p", sampling.top_p, 0, 1, open_low=True)
    _between("min_p", sampling.min_p, 0, 1)
    _between("frequency_penalty", sampling.frequency_penalty, -2, 2)
    _between("presence_penalty", sampling.presence_penalty, -2, 2)
    _between("repetition_penalty", sampling.repetition_penalty, 0, math.inf, open_low=True)
    _at_least("top_k", sampling.top_k, 0)
    _at_least("max_tokens", sampling.max_tokens, 0)
    _at_least("min_tokens", sampling.min_tokens, 0)
    if sampling.max_tokens and sampling.min_tokens > sampling.max_tokens:
        raise RequestError(
            f"min_tokens is {sampling.min_tokens}, but max_tokens is {sampling.max_tokens}", param="min_tokens"
        )
    if sampling.logprobs is not None:
        _between("logprobs", sampling.logprobs, 0, MAX_LOGPROBS)
    if sampling.prompt_logprobs is not None:
        _between("prompt_logprobs", sampling.prompt_logprobs, 0, MAX_LOGPROBS)
    _between("seed", sampling.seed, -(1 << 63), (1 << 63) - 1)
    for token_id, bias in sampling.logit_bias:
        _token("logit_bias", token_id, limits.vocab_size)
        _between("logit_bias", bias, -100, 100)
    if sampling.grammar is not None:
        # Nobody has tried it: it might break the engine.
        raise RequestError("a grammar is given as the request's `grammar`, not among its sampling", param="grammar")
    for token_id in sampling.stop_token_ids:
        _token("stop_token_ids", token_id, limits.vocab_size)


def check_prompt_tokens(count: int, limits: ModelLimits, param: str) -> None:
    """
    Raises:
        RequestError: the prompt is empty, or leaves no room for one token of output.
    """
    if count == 0:
        raise RequestError("the prompt is empty: it has no tokens", param=param)
    if count >= limits.max_context_tokens:
        raise RequestError(
            f"the prompt has {count} tokens, but the context holds {limits.max_context_tokens} with the output",
            param=param,
            code="context_length_exceeded",
        )


def _between(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    # Written so that NaN fails.
    if not (low < value if open_low else low <= value) or not value <= high or value == math.inf:
        above = f"above {low}" if open_low else f"at least {low}"
        upper = "finite" if high == math.inf else f"at most {high}"
        raise RequestError(f"{name} must be {above} and {upper}, not {value}", param=name)


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise RequestError(f"{name} must be at least {low}, not {value}", param=name)


def _token(name: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise RequestError(f"{name} has token id {token_id}, but ids are 0 to {vocab_size - 1}", param=name)
