"""What the load client is tested with: long sessions of short pauses, and answers of a fixed speed."""

from __future__ import annotations

from dataclasses import dataclass

from longturn.bench.bodies import Api
from longturn.bench.presets import Rules
from longturn.bench.traces.blocks import BlockTrie
from longturn.bench.traces.tree import Conversation, SessionTree, TraceRequest
from longturn.errors import ConfigError

_BLOCK_TOKENS = 64
_TURNS = 40
"""Of one session, about the median of recorded ones."""
_GROWTH_TOKENS = 1200
"""By which each prompt is longer than the one before."""
_PAUSE_S = 0.05
"""Between an answer and the next request: short, so that nearly all streams run at all times."""
_SYSTEM_TOKENS = 8192
LEAST_PROMPT_TOKENS = _SYSTEM_TOKENS + _GROWTH_TOKENS


@dataclass(frozen=True, slots=True)
class SelfTestOptions:
    streams: int = 64
    rate: float = 100.0
    """Tokens per second and stream; one event each."""
    prompt_tokens: int = 150_000
    """Of a session's first prompt."""
    output_tokens: int = 444
    duration_s: float = 20.0
    """After a first turn of each stream, in which not all of them run yet."""
    ttft_s: float = 0.1
    api: Api = "chat"
    seed: int = 1

    @property
    def answer_s(self) -> float:
        """Time that the null server takes for an answer."""
        return self.ttft_s + self.output_tokens / self.rate


def long_session(options: SelfTestOptions) -> SessionTree:
    """A session of one agent whose every prompt extends the one before.

    Raises:
        ConfigError: prompts too short for a session.
    """
    if options.prompt_tokens < LEAST_PROMPT_TOKENS:
        raise ConfigError(f"prompt_tokens must be at least {LEAST_PROMPT_TOKENS}, not {options.prompt_tokens}")
    trie = BlockTrie()
    requests = []
    for turn in range(_TURNS):
        tokens = options.prompt_tokens + turn * _GROWTH_TOKENS
        requests.append(
            TraceRequest(
                place=f"requests[{turn}]",
                start_s=turn * (options.answer_s + _PAUSE_S),
                duration_s=options.answer_s,
                input_tokens=tokens,
                output_tokens=options.output_tokens,
                node=trie.add(range(tokens // _BLOCK_TOKENS), f"requests[{turn}]"),
                gap_s=_PAUSE_S if turn else 0.0,
            )
        )
    agent = Conversation("self-test", "root", tuple(requests), system_tokens=_SYSTEM_TOKENS)
    return SessionTree("self-test", "self-test", "self-test", _BLOCK_TOKENS, trie, (agent,))


def self_test_rules(options: SelfTestOptions) -> Rules:
    """Sessions start somewhere in their middle, and some end within the run, as in any measurement."""
    return Rules(
        preset="self-test",
        duration_s=settle_s(options) + options.duration_s,
        least_duration_s=0.0,
        window=(0.25, 1.0),
        seed=options.seed,
        warmup_requests=0,
        warmup_grace_s=300.0,
        tree_idle_s=None,
        system_idle_s=None,
        error_limit=0.1,
        drain_s=10.0 + 2 * options.answer_s,
        comparable=False,
    )


def settle_s(options: SelfTestOptions) -> float:
    """By then every stream has been started."""
    return options.answer_s + _PAUSE_S
