"""Token ids to text as they come, never half a character.

Each token has bytes of its own, so the work per token does not depend on how many came before: its bytes go through an
incremental UTF-8 decoder, which holds back an unfinished character and turns bytes that can be none into U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection

from longturn.frontend.tokenizer import Tokenizer


class Detokenizer:
    """State of one output text. The pieces add up to `Tokenizer.decode` of all tokens."""

    __slots__ = ("_decoder", "_skip", "_strip", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        continues: bool = False,
        keep: Collection[str] = (),
    ) -> None:
        """
        Args:
            tokenizer: where token bytes come from.
            skip_special_tokens: control tokens give no text.
            continues: the text continues other text, so that a space at its start stays.
            keep: control tokens that give text all the same, because a parser looks for them.
        """
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        if self._skip and keep:
            self._skip -= {token_id for token in keep if (token_id := tokenizer.token_id(token)) is not None}
        self._strip = tokenizer.strips_leading_space and not continues

    def push(self, token_id: int) -> str:
        """Text that is certain after one more token; empty while a character is unfinished."""
        if token_id in self._skip:
            return ""
        return self._text(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """The rest at the end of the output: an unfinished character becomes U+FFFD."""
        return self._text(self._decoder.decode(b"", final=True))

    @property
    def whole(self) -> bool:
        """True if no bytes are held back: the tokens so far are exactly the text so far."""
        return not self._decoder.getstate()[0]

    def _text(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
