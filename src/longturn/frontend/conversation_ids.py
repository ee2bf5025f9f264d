"""What a rendering adds to token ids that are known, and where two prompts part."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

_TAIL_CHARS = 256
"""Of a prompt: an empty reasoning block at its end is not longer, and a prompt may have a million characters."""
_ENTRY_BYTES = 1024
"""Bytes counted for an entry's own objects."""


@dataclass(frozen=True, slots=True)
class Form:
    """A rendering of a turn: its prompt, and what its output stands for."""

    prompt_chars: int
    prompt_digest: bytes
    """Length and `text_digest` of the rendered prompt."""
    text: str
    """The output without the stop token."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One finished turn."""

    ids: bytes
    """Prompt and output token ids (int32 little-endian), the stop token among them if one was sampled."""
    page_hashes: tuple[bytes, ...]
    """Of the whole pages of `ids`."""
    prompt_chars: int
    prompt_digest: bytes
    """Length and `text_digest` of the rendered prompt."""
    text: str
    """What the output's ids stand for, without the stop token."""
    end_text: str
    """Text of the stop token at the end of `ids`; empty if there is none."""
    reasoning: str = ""
    """What the client was given as reasoning, and may not send back."""
    arguments: tuple[str, ...] = ()
    """Arguments of its tool calls as the model has spelled them; a client may send the same in another spelling."""
    tools: bytes = b""
    template_arguments: bytes = b""
    """As `History` has them."""
    bare: Form | None = None
    """The turn without the empty reasoning that its ids have, as many templates write it in a history."""

    @property
    def forms(self) -> tuple[Form, ...]:
        """What a rendering of the conversation may begin with."""
        written = Form(self.prompt_chars, self.prompt_digest, self.text)
        return (written,) if self.bare is None else (written, self.bare)

    @property
    def nbytes(self) -> int:
        chars = sum(len(form.text) for form in self.forms) + len(self.reasoning) + sum(map(len, self.arguments))
        return _ENTRY_BYTES + len(self.ids) + 16 * len(self.page_hashes) + 4 * chars


def text_digest(text: str) -> bytes:
    """Digest of a text; unpaired surrogates, which only a client can bring, are hashed as they are."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).digest()


def bare_form(prompt: str, text: str, opening: str, closing: str) -> Form | None:
    """A turn without its empty reasoning; None if it has none.

    Args:
        prompt: rendered; a template that switches thinking off ends it with an empty block.
        text: what the model wrote; it may have closed what the template opened, or said by a closing alone that it
            will not think.
        opening: of reasoning.
        closing: of reasoning.
    """
    start, end = re.escape(opening), re.escape(closing)
    tail = prompt[-_TAIL_CHARS:]
    if (found := re.search(rf"{start}\s*{end}\s*\Z", tail)) is not None:
        begin, rest = found.start(), text
    elif (opened := re.search(rf"{start}\s*\Z", tail)) is not None:
        if (found := re.match(rf"\s*{end}", text)) is None:
            return None
        begin, rest = opened.start(), text[found.end() :]
    elif (found := re.match(rf"\s*(?:{start}\s*)?{end}", text)) is not None:
        begin, rest = len(tail), text[found.end() :]
    else:
        return None
    before = prompt[: len(prompt) - len(tail) + begin]
    return Form(len(before), text_digest(before), rest.lstrip())


def continuation(turn: Turn, rendered: str) -> tuple[bool, str] | None:
    """What a rendering adds to a remembered turn.

    Args:
        turn: the remembered turn.
        rendered: the whole conversation's rendering, new messages and generation prompt included.

    Returns:
        (whether the stop token at the end of `turn.ids` stays, the text that follows), or None if the rendering does
        not continue the remembered ids.
    """
    for form in turn.forms:
        prompt = rendered[: form.prompt_chars]
        if len(prompt) == form.prompt_chars and text_digest(prompt) == form.prompt_digest:
            found = _answer_in(form.text, turn.end_text, rendered[form.prompt_chars :])
            if found is not None:
                return found
    return None


def last_continued(turns: Iterable[Turn], rendered: str) -> tuple[Turn, bool, str] | None:
    """Of several turns the one with the longest prompt that a rendering continues, and what `continuation` says of it.

    The rendering is hashed once for all of them: a conversation may have a hundred turns of half a million characters.
    """
    digest, at = hashlib.blake2b(digest_size=32), 0
    same: list[tuple[Turn, Form]] = []
    for turn, form in sorted(((t, f) for t in turns for f in t.forms), key=lambda pair: pair[1].prompt_chars):
        if form.prompt_chars > len(rendered):
            break
        digest.update(rendered[at : form.prompt_chars].encode("utf-8", "surrogatepass"))
        at = form.prompt_chars
        if digest.copy().digest() == form.prompt_digest:
            same.append((turn, form))
    for turn, form in reversed(same):
        if (rest := _answer_in(form.text, turn.end_text, rendered[form.prompt_chars :])) is not None:
            return turn, *rest
    return None


def _answer_in(text: str, end_text: str, rest: str) -> tuple[bool, str] | None:
    """As `continuation`, from what follows the turn's prompt."""
    if rest.startswith(text):
        after: str | None = rest[len(text) :]
    else:
        after = _after_spaced(rest, text)
    if after is None:
        return None
    if end_text:
        # The template may trim the answer, or put space before its end-of-turn token; the model's ids stay as they are.
        if after.lstrip().startswith(end_text):
            return True, after.lstrip()[len(end_text) :]
        return False, after  # this template ends an answer with something else than what the model sampled
    return False, after


def _after_spaced(rest: str, text: str) -> str | None:
    """What follows `text` in `rest` if they differ in white space only: templates trim, and respace JSON."""
    at = 0
    for word in text.split():
        for char in word:
            while at < len(rest) and rest[at] != char:
                if not rest[at].isspace():
                    return None
                at += 1
            if at == len(rest):
                return None
            at += 1
    return rest[at:]


def common_tokens(a: bytes, b: bytes) -> int:
    """Number of equal tokens at the beginning of two sequences of int32 bytes."""
    count = min(len(a), len(b)) // 4
    differ = np.flatnonzero(np.frombuffer(a, dtype="<i4", count=count) != np.frombuffer(b, dtype="<i4", count=count))
    return int(differ[0]) if len(differ) else count
