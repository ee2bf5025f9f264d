"""A tokenizer's vocabulary and a model's reasoning markers as grammars need them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from longturn.frontend.grammar_reasoning import ReasoningMarks
from longturn.frontend.parsers.registry import ReasoningFormat
from longturn.frontend.tokenizer import Tokenizer, load_tokenizer
from longturn.grammar_library import LongestFirst, Vocabulary
from longturn.source import ModelSource

_PROMPT_END_CHARS = 64
"""The end of the prompt in which an opening marker is looked for."""


def reasoning_marks(form: ReasoningFormat, tokenizer: Tokenizer, rendered: str) -> ReasoningMarks:
    """Of an output that follows the prompt `rendered`."""
    begin, end = form.markers[:2]
    begin_id, end_id = (
        token if (token := tokenizer.token_id(text)) in tokenizer.special_ids else None for text in (begin, end)
    )
    opened = rendered[-_PROMPT_END_CHARS:].rstrip().endswith(begin)
    return ReasoningMarks(begin, end, begin_id, end_id, opened)


def end_token_ids(source: ModelSource, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that end an answer: those that the checkpoint's settings name, and the tokenizer's own."""
    ends = dict.fromkeys(source.eos_token_ids)
    if tokenizer.eos_id is not None:
        ends[tokenizer.eos_id] = None
    return tuple(ends)


def source_vocabulary(source: ModelSource) -> Vocabulary:
    """The vocabulary of a checkpoint; about 0.2 s for 49,000 tokens.

    Raises:
        ModelError: its tokenizer is missing, damaged or not supported.
    """
    tokenizer = load_tokenizer(source)
    return vocabulary_of(tokenizer, source.vocab_size, end_token_ids(source, tokenizer))


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]) -> Vocabulary:
    """
    Args:
        tokenizer: the model's.
        vocab_size: rows of the model's output head, which may be more or fewer than the tokenizer's tokens.
        end_ids: tokens that end an answer.
    """
    tokens = tuple(tokenizer.token_bytes(token) for token in range(vocab_size))
    return Vocabulary(
        tokens=tokens,
        special_ids=tuple(sorted(token for token in tokenizer.special_ids if token < vocab_size)),
        end_ids=tuple(token for token in end_ids if token < vocab_size),
        encode=_PlainEncoder(tokenizer, tokens),
    )


class _PlainEncoder:
    """Encodes text that a grammar forces: the tokens' bytes are exactly the text's, and none of them is special."""

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[bytes]) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        special = [text for token in tokenizer.special_ids if (text := tokenizer.special_text(token))]
        self._special = re.compile(
            "|".join(re.escape(text) for text in sorted(special, key=len, reverse=True)) or r"(?!)"
        )
        # Behind a special token no space is put before the text.
        self._lead = special[0] if special and tokenizer.adds_prefix_space else ""
        self._longest_first: LongestFirst | None = None

    def __call__(self, text: str) -> list[int]:
        pieces, at = [], 0
        for found in self._special.finditer(text):
            # What would be read as a control token is cut in two.
            pieces.append(text[at : found.start() + 1])
            at = found.start() + 1
        pieces.append(text[at:])
        ids = [token for piece in pieces for token in self._encode(piece)]
        special = self._tokenizer.special_ids
        if b"".join(map(self._tokenizer.token_bytes, ids)) == text.encode() and special.isdisjoint(ids):
            return ids
        if self._longest_first is None:
            self._longest_first = LongestFirst(self._tokens, tuple(special))
        return self._longest_first(text.encode())

    def _encode(self, text: str) -> list[int]:
        if not text:
            return []
        return self._tokenizer.encode(self._lead + text)[1 if self._lead else 0 :]
