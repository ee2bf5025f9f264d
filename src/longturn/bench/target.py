"""What a replay sends its requests to: a server over HTTP (`client.ChatClient`), or an engine without one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from longturn.bench.records import Answer


class Target(Protocol):
    """Answers requests in the form of OpenAI's APIs."""

    async def send(
        self,
        body: Mapping[str, Any],
        *,
        intended_ns: int | None = None,
        session_id: str | None = None,
        path: str = "/v1/chat/completions",
    ) -> Answer:
        """Send one request and wait for its whole answer.

        Args:
            body: the request: `messages` or `prompt`, `max_tokens`, `temperature`, `ignore_eos`, `return_token_ids`.
            intended_ns: when the schedule wanted it sent (`time.perf_counter_ns`); now if None.
            session_id: of the session tree.
            path: the API that the body is for.

        Returns:
            The answer. What goes wrong with this request is in `error`; nothing is raised but a cancellation.
        """
        ...


UNKNOWN = "unknown"
_ENGINES = frozenset({"longturn", "vllm", "sglang"})
"""What servers call themselves in `owned_by`; hosted services have their own name there, or a customer's."""
_GPU = re.compile(r"cuda \((.+)\)")
"""Longturn's `device`."""


@dataclass(frozen=True, slots=True)
class TargetModel:
    """What a target tells of a model that it serves; None where it does not tell."""

    name: str
    context_tokens: int | None = None
    """Longest prompt and output together."""
    engine: str | None = None
    version: str | None = None
    """Of the engine."""
    quantisation: str | None = None
    """Weights as served: `bf16`, `q4_1` ..."""
    weights: str | None = None
    """How Longturn computes with them: `packed` or `fp32`."""
    kv_cache: str | None = None
    """Data type of the KV cache."""
    chip: str | None = None
    """Name of the GPU; a CPU's device says how it computes, not what it is."""


def target_model(entry: Mapping[str, Any]) -> TargetModel:
    """A model as an entry of OpenAI's model list describes it: `max_model_len` as vLLM has it, the engine by its owner,
    and what Longturn adds under `longturn`.

    Raises:
        KeyError, TypeError: it is no such entry.
    """
    limit, owner, more = entry.get("max_model_len"), entry.get("owned_by"), entry.get("longturn")
    told = more if isinstance(more, Mapping) else {}

    def text(name: str) -> str | None:
        value = told.get(name)
        return value if isinstance(value, str) and value != UNKNOWN else None

    gpu = _GPU.fullmatch(text("device") or "")
    return TargetModel(
        name=str(entry["id"]),
        context_tokens=limit if isinstance(limit, int) else None,
        engine=owner if owner in _ENGINES else None,
        version=text("version"),
        quantisation=text("quantisation"),
        weights=text("weights"),
        kv_cache=text("kv_cache"),
        chip=gpu[1] if gpu else None,
    )
