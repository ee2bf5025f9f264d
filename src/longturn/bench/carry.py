"""Prompts whose history holds what the server really answered, with the lengths that were recorded.

A turn that extends the one before it is that whole prompt, its unhashed tail too, then the answer, then new text up to
the recorded length: so the server finds everything that it has computed and written itself. Where a recorded prompt
keeps only a part of the one before it, that part is kept. A recorded prompt too short for the answer cuts the answer's
end. Prompts before the first answer (the warm-up, an agent's first request) and after a failed first one are the
recorded ones, and an answer that failed later is replaced by made-up text of the recorded length.

An answer's text may have other tokens in a prompt than it had as output. How many shows in the server's count of that
prompt, so the next one makes up for it: each prompt is off by its newest answer's difference alone.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from longturn.bench.bodies import Bodies, ChatBodies, Prompt, TokenBodies
from longturn.bench.carry_forms import ChatForm, Form, Piece, TokenForm
from longturn.bench.records import Answer
from longturn.bench.synth import RequestKey, RequestSymbols, request_keys, request_of, shared_blocks
from longturn.bench.traces.tree import SessionTree, TraceRequest

SLACK_SHARE = 0.02
SLACK_LEAST_TOKENS = 16
"""A prompt whose newest answer has not been counted yet may be off by this share of its tokens, or by this many."""


@dataclass(frozen=True, slots=True)
class _Made:
    """One prompt."""

    pieces: tuple[Piece, ...]
    tokens: int
    """What the server should count, or has counted."""
    prefix_tokens: int = 0
    counted: bool = True
    """The length of its newest answer is known."""

    @property
    def has_answer(self) -> bool:
        return _has_answer(self.pieces)


@dataclass(slots=True)
class _Replay:
    """What has been made for one replay of a session, and what came back."""

    prompts: dict[RequestKey, _Made] = field(default_factory=dict)
    answers: dict[RequestKey, Answer] = field(default_factory=dict)


class LiveBodies:
    """Implements `bodies.Bodies`. Prompts may be made on another thread than answers arrive on."""

    def __init__(self, form: Form, trees: Sequence[SessionTree], seed: int) -> None:
        """
        Args:
            form: made for the same `trees` and seed.
            trees: the sessions that will be replayed, scaled and filtered already.
            seed: of the content.
        """
        self.path = form.path
        self._form = form
        self._seed = seed
        self._numbers = {tree.id: {key: n for n, key in enumerate(request_keys(tree))} for tree in trees}
        self._lock = threading.Lock()
        self._replays: dict[str, _Replay] = {}

    def prompt(self, tree: SessionTree, key: RequestKey, marker: str) -> Prompt:
        with self._lock:
            replay = self._replays.setdefault(marker, _Replay())
            made = replay.prompts.get(key)
            others, answer = dict(replay.prompts), replay.answers.get(_before(key))
        if made is None:
            made = self._make(tree, key, marker, others, answer)
            with self._lock:
                made = replay.prompts.setdefault(key, made)
        slack = 0 if made.counted else max(SLACK_LEAST_TOKENS, round(SLACK_SHARE * made.tokens))
        return Prompt(self._form.fields(made.pieces), made.tokens, slack, made.prefix_tokens)

    def answered(self, tree: SessionTree, key: RequestKey, marker: str, answer: Answer) -> None:
        with self._lock:
            replay = self._replays.setdefault(marker, _Replay())
            replay.answers[key] = answer
            made = replay.prompts.get(key)
            if made is not None and not made.counted and answer.ok and answer.prompt_tokens is not None:
                replay.prompts[key] = _recounted(made, answer.prompt_tokens)

    def forget(self, marker: str) -> None:
        with self._lock:
            self._replays.pop(marker, None)

    # --- one prompt --------------------------------------------------------------------------------------------------

    def _make(
        self,
        tree: SessionTree,
        key: RequestKey,
        marker: str,
        others: Mapping[RequestKey, _Made],
        answer: Answer | None,
    ) -> _Made:
        before = others.get(_before(key))
        if before is not None:
            found = self._next_turn(tree, key, marker, before, answer)
        else:
            found = self._fork(tree, key, marker, others)
        if found is not None:
            return found
        pieces = tuple(self._form.recorded(tree, key, marker))
        return _Made(pieces, self._total(pieces))

    def _next_turn(
        self, tree: SessionTree, key: RequestKey, marker: str, before: _Made, answer: Answer | None
    ) -> _Made | None:
        """The turn after `before`; None where nothing in it would be an answer."""
        wanted, last = request_of(tree, key), request_of(tree, _before(key))
        said = self._form.answer(answer, last.output_tokens) if answer is not None and answer.ok else None
        written = said is not None
        if said is None and before.has_answer and last.output_tokens:
            symbols = RequestSymbols(f"{self._seed}:{marker}:answer", _before(key), self._form.vocabulary)
            said = self._form.made("assistant", symbols(last.output_tokens))
        shared = _shared_tokens(tree, last, wanted)
        if tree.trie.common(last.node, wanted.node) == last.node:
            pieces = self._filled(tree, key, marker, before.pieces, said)
            if pieces is not None and _has_answer(pieces):
                new = pieces[len(before.pieces) : -1]
                # The last token of an answer is sampled and never computed.
                known = before.tokens + sum(max(0, piece.tokens - 1) for piece in new)
                return self._result(pieces, known if written else 0, before, new)
        prefix = self._head(before.pieces, shared)
        pieces = self._filled(tree, key, marker, prefix, said)
        if pieces is None or not _has_answer(pieces):
            return None
        return self._result(pieces, shared if written else 0, before, (*prefix[-1:], *pieces[len(prefix) : -1]))

    def _fork(
        self, tree: SessionTree, key: RequestKey, marker: str, others: Mapping[RequestKey, _Made]
    ) -> _Made | None:
        """An agent's first prompt that shares an answer with another agent's; None if it shares none."""
        wanted = request_of(tree, key)
        shares = [
            (_shared_tokens(tree, request_of(tree, other), wanted), made)
            for other, made in others.items()
            if made.has_answer
        ]
        if not shares:
            return None
        shared, base = max(shares, key=lambda pair: pair[0])
        prefix = self._head(base.pieces, shared)
        pieces = self._filled(tree, key, marker, prefix, None) if _has_answer(prefix) else None
        # Whether the other agent's prompt was computed is not known here; what was recorded is shared in any case.
        return None if pieces is None else self._result(pieces, 0, base, prefix[-1:])

    def _result(self, pieces: tuple[Piece, ...], known: int, base: _Made, new: Sequence[Piece]) -> _Made:
        """`new`: the pieces that `base` does not have, or has not cut there."""
        sure = base.counted and not any(piece.live and piece not in base.pieces for piece in new)
        return _Made(pieces, self._total(pieces), known, self._form.exact or sure)

    def _filled(
        self, tree: SessionTree, key: RequestKey, marker: str, prefix: Sequence[Piece], said: Piece | None
    ) -> tuple[Piece, ...] | None:
        """The prefix, the answer as far as it fits, and text of the user's up to the recorded length.

        None where not even the shortest text fits.
        """
        if not prefix:
            return None
        form, numbers = self._form, self._numbers[tree.id]
        wanted = request_of(tree, key).input_tokens
        symbols = RequestSymbols(
            f"{self._seed}:{marker}", key, form.vocabulary, number=numbers[key], total=len(numbers)
        )
        nothing = form.made("user", symbols(0))
        head = tuple(prefix)
        if said is not None and prefix[-1].role != said.role and form.between(prefix[-1], said) is not None:
            over = self._total((*head, said, nothing)) + symbols.digits - wanted
            if over < said.tokens:
                head = (*head, form.cut(said, said.tokens - max(0, over)))
        room = wanted - self._total((*head, nothing))
        return (*head, form.made("user", symbols(room))) if room >= symbols.digits else None

    def _head(self, pieces: Sequence[Piece], tokens: int) -> tuple[Piece, ...]:
        """The pieces of the first `tokens` tokens of a prompt, the last one cut."""
        kept: list[Piece] = []
        left = tokens
        for piece in pieces:
            left -= self._change(kept[-1], piece) if kept else self._form.front(piece)
            if left <= 0:
                break
            kept.append(piece if piece.tokens <= left else self._form.cut(piece, left))
            left -= piece.tokens
        return tuple(kept)

    def _total(self, pieces: Sequence[Piece]) -> int:
        changes = sum(self._change(one, other) for one, other in itertools.pairwise(pieces))
        return self._form.front(pieces[0]) + sum(piece.tokens for piece in pieces) + changes + self._form.end

    def _change(self, one: Piece, other: Piece) -> int:
        return self._form.between(one, other) or 0


def _has_answer(pieces: Sequence[Piece]) -> bool:
    return any(piece.live for piece in pieces)


def _before(key: RequestKey) -> RequestKey:
    return replace(key, index=key.index - 1)


def _shared_tokens(tree: SessionTree, one: TraceRequest, other: TraceRequest) -> int:
    """Tokens that two prompts share as recorded."""
    return shared_blocks(tree.trie, one.node, other.node) * tree.block_tokens


def _recounted(made: _Made, tokens: int) -> _Made:
    """With the length of the newest answer as the server's count of the whole prompt has it."""
    at = max(n for n, piece in enumerate(made.pieces) if piece.live)
    newest = made.pieces[at]
    counted = replace(newest, tokens=max(0, newest.tokens + tokens - made.tokens))
    return _Made((*made.pieces[:at], counted, *made.pieces[at + 1 :]), tokens, made.prefix_tokens)


def with_answers(bodies: Bodies, trees: Sequence[SessionTree], seed: int) -> LiveBodies:
    """Bodies with the server's answers in their history, from recorded ones of the same sessions and seed."""
    if isinstance(bodies, TokenBodies):
        return LiveBodies(TokenForm(bodies.prompts), trees, seed)
    if isinstance(bodies, ChatBodies):
        return LiveBodies(ChatForm(bodies.prompts), trees, seed)
    raise TypeError(f"no form for the prompts of {type(bodies).__name__}")
