"""What `bench agentx` measures: a server by its URL, or an engine started for it."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from longturn.bench.bodies import Api, Bodies, make_bodies, make_bodies_with
from longturn.bench.carry import with_answers
from longturn.bench.client import ChatClient, TargetError
from longturn.bench.encoded import encoded
from longturn.bench.server_samples import ReadState, reader
from longturn.bench.target import Target, TargetModel
from longturn.bench.traces.tree import SessionTree
from longturn.cli.config_text import engine_settings, told_settings
from longturn.config import EngineConfig

Kind = Literal["http", "inproc"]
MakeBodies = Callable[[Api, Sequence[SessionTree], int, range | None], Awaitable[Bodies]]
"""(api, sessions, seed, token ids) to recorded bodies."""


@dataclass(frozen=True, slots=True)
class OpenTarget:
    """A target that is ready, and the model that is measured."""

    kind: Kind
    place: str
    """Where it is, for messages."""
    target: Target
    model: TargetModel
    recorded_bodies: MakeBodies
    read_state: ReadState | None = None
    """Of the server: its queue and cache."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Of a Longturn engine: what differs from its defaults."""

    async def bodies(
        self, api: Api, trees: Sequence[SessionTree], seed: int, token_ids: range | None, *, live: bool
    ) -> Bodies:
        """The prompts of these sessions.

        Args:
            api: of the bodies.
            trees: scaled and filtered already.
            seed: of the content.
            token_ids: that prompts may be made of, for completions.
            live: with the target's answers in the history.

        Raises:
            TargetError, ConfigError: as `bench.bodies.make_bodies`.
        """
        bodies = await self.recorded_bodies(api, trees, seed, token_ids)
        if live:
            bodies = with_answers(bodies, trees, seed)
        return encoded(bodies) if self.kind == "http" else bodies


@asynccontextmanager
async def open_target(args: argparse.Namespace, config: EngineConfig | None) -> AsyncIterator[OpenTarget]:
    """Reach the server that the arguments name, or start an engine with `config` if one is given.

    Raises:
        TargetError: the server cannot be reached, or lacks the model.
        LongturnError: the engine could not be started.
    """
    if config is not None:
        from longturn.cli.inproc_target import inproc_target

        async with inproc_target(config, timeout_s=args.timeout) as started:

            async def from_engine(api: Api, trees: Sequence[SessionTree], seed: int, ids: range | None) -> Bodies:
                return await make_bodies_with(started.target.tokenize, api, trees, seed, token_ids=ids)

            yield OpenTarget(
                "inproc",
                "the engine",
                started.target,
                started.model,
                from_engine,
                started.read_state,
                engine_settings(config),
            )
        return
    async with ChatClient(args.url, api_key=args.api_key, timeout_s=args.timeout) as client:
        name = await client.choose_model(args.model)

        async def from_server(api: Api, trees: Sequence[SessionTree], seed: int, ids: range | None) -> Bodies:
            return await make_bodies(api, trees, seed, url=client.url, model=name, api_key=args.api_key, token_ids=ids)

        model = (await client.served_models())[name]
        settings = await _settings(client) if model.engine == "longturn" else {}
        yield OpenTarget("http", f"the server at {client.url}", client, model, from_server, reader(client), settings)


async def _settings(client: ChatClient) -> dict[str, str]:
    try:
        info = await client.get_json("/server_info", dict[str, Any])
    except TargetError:
        return {}  # a proxy that shows no more than the API: points then do not tell settings, as of other engines
    config = info.get("config")
    return told_settings(config) if isinstance(config, dict) else {}
