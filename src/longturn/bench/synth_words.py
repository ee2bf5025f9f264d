"""Words that are one token each for the server under test, and what its chat template adds: found by asking it.

Only `POST /tokenize` is used (`prompt` or `messages` in, `tokens` out), as vLLM, SGLang and Longturn have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import aiohttp
import msgspec

from longturn.bench.client import TargetError

OPENER = "The"
"""Every text starts with it. A first word has no space before it, so that it may be tokenised as no other is."""
_LEAST_WORDS = 32

CANDIDATES = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education foot boy age policy music market sense nation plan college "
    "interest death experience effect use class control field development role effort rate heart drug show leader "
    "light voice wife police mind price report decision son view relationship town road arm difference value building "
    "action season society tax director position player record paper space ground form event official matter center "
    "couple site project activity star table need court oil situation cost industry figure street image phone data "
    "picture practice piece land product doctor wall patient worker news test movie north love step south film tree "
    "source hair window culture chance brother energy period course summer plant opportunity term letter condition "
    "choice rule daughter range support floor campaign material population call economy hospital church risk fire "
    "future bank west sport board subject officer rest behavior performance fight top goal second bed order author "
    "blood agency nature color store sound movement page race concern series language response animal factor decade "
    "article east artist scene stock career treatment approach size dog fund media sign thought list individual "
    "quality pressure answer resource meeting disease success cup amount ability staff character growth loss degree "
    "attack region television box training trade deal election feeling standard bill message analysis benefit sex "
    "lawyer section glass skill sister professor operation crime stage authority design sort knowledge gun station "
    "strategy truth song example environment leg dark note fine"
)


class Tokenize(Protocol):
    """Sends the body of a `/tokenize` request, returns the token ids."""

    async def __call__(self, body: Mapping[str, Any]) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Words:
    """Different words, each one token after a space, and the ids of those tokens."""

    words: tuple[str, ...]
    token_ids: tuple[int, ...]
    opener_tokens: int = 1
    """Tokens of `OPENER`."""


@dataclass(frozen=True, slots=True)
class ChatCosts:
    """Tokens in a chat prompt that are not words of ours, by where they are; a message's opener counts as template."""

    front_with_system: int
    """Before the first word of a prompt that starts with a system message."""
    front: int
    """Before the first word of one that starts with the user; many templates add a system prompt of their own."""
    system_to_user: int
    """Between the last word of the system message and the first of the user's."""
    user_to_assistant: int
    assistant_to_user: int
    end: int
    """After the last word."""

    def between(self, role: str, following: str) -> int:
        """Tokens between two messages; 0 within one."""
        costs = {
            ("system", "user"): self.system_to_user,
            ("user", "assistant"): self.user_to_assistant,
            ("assistant", "user"): self.assistant_to_user,
        }
        return 0 if role == following else costs[role, following]


class _Answer(msgspec.Struct):
    tokens: list[int]


class HttpTokenize:
    """`/tokenize` of a server. Use as an async context manager."""

    def __init__(self, url: str, model: str, *, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + "/tokenize"
        self._model = model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> HttpTokenize:
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=self._timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def __call__(self, body: Mapping[str, Any]) -> Sequence[int]:
        """Raises TargetError if the server cannot be reached or has no such endpoint."""
        assert self._session is not None, "use HttpTokenize in an `async with`"
        try:
            async with self._session.post(self._url, json={"model": self._model, **body}) as response:
                data = await response.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise TargetError(f"no answer from {self._url}: {reason}") from error
        if response.status != 200:
            raise TargetError(
                f"{self._url} answered {response.status}: exact chat prompts need it; completions with token ids don't"
            )
        try:
            return msgspec.json.decode(data, type=_Answer).tokens
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TargetError(f"{self._url} sent no token list: {error}") from error


async def find_words(tokenize: Tokenize) -> Words:
    """The candidates that are one token each for this server, and different tokens.

    Raises:
        TargetError: fewer than 32 are.
    """
    opener = len(await tokenize({"prompt": OPENER, "add_special_tokens": False}))

    async def good(words: Sequence[str]) -> list[tuple[str, int]]:
        """Tokenises all at once, and halves where the count is wrong: a few dozen requests instead of hundreds."""
        tokens = await tokenize({"prompt": " ".join([OPENER, *words]), "add_special_tokens": False})
        if len(tokens) == opener + len(words):
            return list(zip(words, tokens[opener:], strict=True))
        if len(words) == 1:
            return []
        middle = len(words) // 2
        return await good(words[:middle]) + await good(words[middle:])

    found: dict[int, str] = {}
    for word, token in await good(tuple(dict.fromkeys(CANDIDATES.split()))):
        found.setdefault(token, word)
    if len(found) < _LEAST_WORDS:
        raise TargetError(f"only {len(found)} of the words for prompts are one token for this server's tokenizer")
    return Words(tuple(found.values()), tuple(found), opener)


async def measure_costs(tokenize: Tokenize, words: Words) -> ChatCosts:
    """What the chat template adds, and where: words of ours are found again among the tokens.

    Raises:
        TargetError: words cannot be found, or what the template adds is not the same for each message, so that lengths
            cannot be predicted.
    """

    async def around(*roles: str) -> list[int]:
        """Tokens before, between and after the words of a conversation of three words a message."""
        runs = [slice(3 * index, 3 * index + 3) for index in range(len(roles))]
        texts = [" ".join([OPENER, *words.words[run]]) for run in runs]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        tokens = list(await tokenize({"messages": messages, "add_generation_prompt": True}))
        found, start = [], 0
        for run in runs:
            wanted = list(words.token_ids[run])
            at = next((n for n in range(start, len(tokens) - 2) if tokens[n : n + 3] == wanted), None)
            if at is None:
                raise TargetError(
                    "the words of a chat prompt are not among its tokens: its lengths cannot be predicted"
                )
            found.append(at - start)
            start = at + 3
        return [*found, len(tokens) - start]

    front, end = await around("user")
    with_system, system_to_user, _ = await around("system", "user")
    _, user_to_assistant, assistant_to_user, _ = await around("user", "assistant", "user")
    costs = ChatCosts(with_system, front, system_to_user, user_to_assistant, assistant_to_user, end)
    pair = [user_to_assistant, assistant_to_user]
    expected = [with_system, system_to_user, *pair, *pair, end]
    longer = await around("system", "user", "assistant", "user", "assistant", "user")
    if longer != expected:
        raise TargetError(
            f"the chat template adds {longer} tokens around messages where {expected} were expected: lengths of chat "
            "prompts cannot be predicted; completions with token ids are exact"
        )
    return costs
