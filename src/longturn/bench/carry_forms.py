"""How prompts with answers in them are written: as chat messages or as token ids."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from longturn.bench.records import Answer
from longturn.bench.synth import RequestKey, Symbols, TokenPrompts
from longturn.bench.synth_chat import ChatPrompts
from longturn.bench.synth_words import OPENER
from longturn.bench.traces.tree import SessionTree


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A part of a prompt, of one message; prompts that share it hold the same object."""

    role: str
    tokens: int
    """Without what a chat template adds."""
    live: bool = False
    """An answer of the server; made up otherwise."""
    text: str = ""
    """Of a chat."""
    ids: Symbols | None = None
    """[tokens] int64: token ids, or the symbols of made-up chat text."""


class Form(Protocol):
    """How pieces become a prompt, and what lies between them."""

    @property
    def path(self) -> str: ...

    @property
    def exact(self) -> bool:
        """Whether an answer has the same tokens in a prompt that it had as output."""
        ...

    @property
    def vocabulary(self) -> int:
        """Number of symbols."""
        ...

    @property
    def end(self) -> int:
        """Tokens after the last piece."""
        ...

    def made(self, role: str, symbols: Symbols) -> Piece:
        """Made-up content."""
        ...

    def recorded(self, tree: SessionTree, key: RequestKey, marker: str) -> list[Piece]:
        """The prompt as it is without answers."""
        ...

    def answer(self, answer: Answer, tokens: int) -> Piece | None:
        """The server's answer; None if there is nothing to carry.

        Args:
            answer: one that succeeded.
            tokens: its length as recorded.
        """
        ...

    def cut(self, piece: Piece, tokens: int) -> Piece:
        """The first `tokens` tokens of a piece, as many or about as many."""
        ...

    def front(self, first: Piece) -> int:
        """Tokens before the first piece."""
        ...

    def between(self, one: Piece, other: Piece) -> int | None:
        """Tokens between two pieces; None if the second cannot follow the first."""
        ...

    def fields(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """For the body."""
        ...


class ChatForm:
    """Messages: an answer is its text."""

    path = "/v1/chat/completions"
    exact = False

    def __init__(self, prompts: ChatPrompts) -> None:
        self._prompts = prompts
        self._costs = prompts.costs
        self._words = np.asarray(prompts.words, dtype=object)
        self._opener_tokens = prompts.opener_tokens
        self.vocabulary = len(prompts.words)
        self.end = prompts.costs.end

    def made(self, role: str, symbols: Symbols) -> Piece:
        return Piece(role, len(symbols), text=" ".join(self._words[symbols]), ids=symbols)

    def recorded(self, tree: SessionTree, key: RequestKey, marker: str) -> list[Piece]:
        parts, _ = self._prompts.parts(tree, key, marker)
        return [
            self.made(role, np.concatenate([symbols for _, symbols in group]))
            for role, group in itertools.groupby(parts, key=lambda part: part[0])
        ]

    def answer(self, answer: Answer, tokens: int) -> Piece | None:
        # A model that wrote nothing but reasoning or control tokens leaves no text; some servers refuse an empty one.
        if not answer.text.strip():
            return None
        return Piece("assistant", answer.output_tokens or tokens, live=True, text=answer.text)

    def cut(self, piece: Piece, tokens: int) -> Piece:
        if piece.ids is not None:
            return self.made(piece.role, piece.ids[:tokens])
        if tokens >= piece.tokens:
            return piece
        # Which characters make a token is the server's to say; the count of the prompt will tell how many were kept.
        return replace(piece, tokens=tokens, text=piece.text[: max(1, len(piece.text) * tokens // piece.tokens)])

    def front(self, first: Piece) -> int:
        return self._costs.front_with_system if first.role == "system" else self._costs.front

    def between(self, one: Piece, other: Piece) -> int | None:
        if (one.role, other.role) == ("system", "assistant"):
            return None
        added = self._costs.between(one.role, other.role)
        # A message of ours starts with the opener, which counts as template; an answer is as it is.
        return added - self._opener_tokens if other.live else added

    def fields(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        messages = []
        for role, group in itertools.groupby(pieces, key=lambda piece: piece.role):
            parts = list(group)
            opener = [] if parts[0].live else [OPENER]
            messages.append({"role": role, "content": " ".join([*opener, *(part.text for part in parts if part.text)])})
        return {"messages": messages}


class TokenForm:
    """Token ids: an answer is its tokens, which the server is asked for."""

    path = "/v1/completions"
    exact = True
    end = 0

    def __init__(self, prompts: TokenPrompts) -> None:
        self._prompts = prompts
        self._ids = np.asarray(prompts.token_ids, np.int64)
        self.vocabulary = len(prompts.token_ids)

    def made(self, role: str, symbols: Symbols) -> Piece:
        return Piece(role, len(symbols), ids=self._ids[symbols])

    def recorded(self, tree: SessionTree, key: RequestKey, marker: str) -> list[Piece]:
        ids = np.asarray(self._prompts.prompt(tree, key, marker), np.int64)
        return [Piece("user", len(ids), ids=ids)]

    def answer(self, answer: Answer, tokens: int) -> Piece | None:
        if not answer.token_ids:
            return None
        return Piece("assistant", len(answer.token_ids), live=True, ids=np.asarray(answer.token_ids, np.int64))

    def cut(self, piece: Piece, tokens: int) -> Piece:
        assert piece.ids is not None
        ids = piece.ids[:tokens]
        return replace(piece, tokens=len(ids), ids=ids)

    def front(self, first: Piece) -> int:
        return 0

    def between(self, one: Piece, other: Piece) -> int | None:
        return 0

    def fields(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        ids = np.concatenate([piece.ids for piece in pieces if piece.ids is not None])
        return {"prompt": ids.tolist(), "return_token_ids": True}
