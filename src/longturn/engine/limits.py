"""What the scheduler refuses: settings out of range, and requests that could never run."""

from __future__ import annotations

from longturn.config import PAGE_TOKENS, CacheConfig, SchedulerConfig, check_config
from longturn.engine.protocols import ExecutorInfo
from longturn.engine.records import EngineRequest
from longturn.errors import ConfigError, RequestError

_TOKEN_BYTES = 4


def context_limit(info: ExecutorInfo) -> int:
    """Most tokens of prompt and output together: the model's context, or what the whole page pool can hold."""
    return min(info.max_context_tokens, (info.pages - 1) * PAGE_TOKENS)


def validate_config(scheduler: SchedulerConfig, cache: CacheConfig, info: ExecutorInfo) -> None:
    """Raises ConfigError, naming the setting, if one is out of range."""
    check_config(scheduler, where="scheduler.")
    check_config(cache, where="cache.")
    if info.pages < 2:
        raise ConfigError(
            f"'cache.memory_bytes' is too small for one page of {info.page_bytes} bytes and the null page"
        )
    if cache.host_memory_bytes and not cache.prefix_caching:
        raise ConfigError("'cache.host_memory_bytes' keeps cached pages: it needs 'cache.prefix_caching'")
    if info.rows < 1:
        raise ConfigError(f"executor {info.device} has no rows")


def validate_request(request: EngineRequest, info: ExecutorInfo) -> int:
    """The number of prompt tokens.

    Raises:
        RequestError: the request is malformed or could never fit; the message has the numbers.
    """
    tokens, rest = divmod(len(request.prompt), _TOKEN_BYTES)
    if rest:
        raise RequestError(f"prompt of {len(request.prompt)} bytes is not a list of int32 tokens", param="prompt")
    if tokens == 0:
        raise RequestError("prompt has no tokens", param="prompt")
    if request.sampling.max_tokens < 1:
        raise RequestError(f"max_tokens must be at least 1, not {request.sampling.max_tokens}", param="max_tokens")
    if request.sampling.prompt_logprobs is not None and not info.scores_prompts:
        raise RequestError(
            f"log-probabilities of a prompt are not computed on this device ({info.device})",
            param="prompt_logprobs",
            code="unsupported_value",
        )
    if len(request.page_hashes) > tokens // PAGE_TOKENS:
        raise RequestError(
            f"{len(request.page_hashes)} page hashes for a prompt of {tokens // PAGE_TOKENS} whole pages",
            param="page_hashes",
        )
    if tokens + 1 > info.max_context_tokens:
        raise RequestError(
            f"prompt of {tokens} tokens leaves no room for output in the context of {info.max_context_tokens} tokens",
            param="prompt",
            code="context_length_exceeded",
        )
    if tokens + 1 > context_limit(info):
        raise RequestError(
            f"prompt of {tokens} tokens does not fit the cache of {context_limit(info)} tokens"
            f" ({info.pages - 1} pages); raise cache.memory_bytes",
            param="prompt",
            code="context_length_exceeded",
        )
    return tokens
