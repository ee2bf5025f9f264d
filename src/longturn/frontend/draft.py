"""A prompt before it is tokenised: rendered, and what of it is known as token ids from earlier turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from longturn.engine.records import pack_tokens
from longturn.errors import RequestError
from longturn.frontend.chat_template import ChatTemplates, as_written, check_values
from longturn.frontend.conversation import ConversationMemory, Found
from longturn.frontend.conversation_ids import Turn, continuation, last_continued
from longturn.frontend.conversation_keys import History, history_of, text_history
from longturn.frontend.conversation_reuse import edited_reasoning
from longturn.frontend.parsers.registry import OutputFormat
from longturn.frontend.records import ChatPrompt, TextPrompt, TextRequest, TokenPrompt, VolatileSpan
from longturn.frontend.tokenizer import Tokenizer
from longturn.frontend.validate import ModelLimits
from longturn.frontend.volatile import HeaderWatch


@dataclass(frozen=True, slots=True)
class Draft:
    """A prompt before tokenisation: ids that are known, and text that follows."""

    text: str
    param: str
    """Name of the request's field, for messages."""
    ids: bytes = b""
    hashes: tuple[bytes, ...] = ()
    lead: str = ""
    """Last special token of `ids`: the text is tokenised behind it, since it may take the space around it."""
    add_special_tokens: bool = False
    rendered: str = ""
    """The whole prompt text."""
    history: History | None = None
    found: Found | None = None
    extends: bool = False
    """`ids` are what the last answer in the history left behind."""
    volatile: VolatileSpan | None = None
    edited: bool = False
    """The client sends other reasoning back than the model's."""


class Drafts:
    """Makes drafts of one model's prompts."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: ChatTemplates,
        limits: ModelLimits,
        memory: ConversationMemory,
        headers: HeaderWatch,
        output: OutputFormat,
    ) -> None:
        """
        Args:
            tokenizer: the model's.
            templates: its chat templates.
            limits: what bounds a request.
            memory: what remembers conversations.
            headers: what finds volatile parts of system prompts, and may move them.
            output: how the model writes tool calls.
        """
        self._tokenizer = tokenizer
        self._templates = templates
        self._vocab_size = limits.vocab_size
        self._memory = memory
        self._headers = headers
        self._output = output
        self._ends = tuple(end for token in limits.eos_token_ids if (end := tokenizer.special_text(token)))

    def draft(self, request: TextRequest) -> Draft:
        """Render a request and find what of it is known as token ids.

        Raises:
            RequestError: a token id is out of range, or the template refuses the messages.
        """
        prompt = request.prompt
        if isinstance(prompt, TokenPrompt):
            check_ids(prompt.token_ids, self._vocab_size, "prompt")
            return Draft("", "prompt", ids=pack_tokens(prompt.token_ids))
        names = {"tenant": request.tenant, "cache_salt": request.cache_salt, "session_id": request.session_id}
        if isinstance(prompt, TextPrompt):
            history = text_history(prompt.text, self._ends, **names)
            text = Draft(prompt.text, "prompt", add_special_tokens=True, rendered=prompt.text, history=history)
            return self._continued(dataclasses.replace(text, found=self._memory.find(history)), {})
        check_values(prompt)
        prompt = self._headers.settled(prompt, request)
        history = history_of(prompt, **names)
        turns = self._memory.answers(history)
        rendered = self.render(as_written(prompt, turns))
        volatile, edited = self._headers.observe(prompt, rendered, request, history), edited_reasoning(prompt, turns)
        chat = Draft(rendered, "messages", rendered=rendered, history=history, volatile=volatile, edited=edited)
        return self._continued(dataclasses.replace(chat, found=self._memory.find(history)), turns)

    def _continued(self, plain: Draft, turns: Mapping[int, Turn]) -> Draft:
        """A draft that begins with the ids of the longest remembered turn that it continues.

        Args:
            plain: the draft as text.
            turns: earlier ones of its conversation, for where it does not continue the last that is known.
        """
        turn = None if plain.found is None else plain.found.turn
        if turn is None:
            return plain
        rest = continuation(turn, plain.rendered)
        if last := rest is not None:
            stays, text = rest
        elif (earlier := last_continued(turns.values(), plain.rendered)) is not None:
            turn, stays, text = earlier
        else:
            return plain
        ids = turn.ids if stays or not turn.end_text else turn.ids[:-4]
        if not stays and self._tokenizer.adds_prefix_space and self._tokenizer.special_prefix(text) is None:
            return plain  # tokenised by itself the new part would get a space that the conversation does not have
        return dataclasses.replace(
            plain,
            text=text,
            ids=ids,
            hashes=turn.page_hashes,
            lead=turn.end_text if stays else "",
            add_special_tokens=False,
            extends=last and plain.found is not None and plain.found.is_last,
        )

    def settled(self, prompt: ChatPrompt, request: TextRequest) -> str:
        """The whole text of a chat's prompt, volatile lines moved where that is the mode.

        Raises:
            RequestError: the template refuses the messages.
        """
        return self.render(self._headers.settled(prompt, request))

    def render(self, prompt: ChatPrompt) -> str:
        """The whole text of a chat's prompt.

        Raises:
            RequestError: the template refuses the messages.
        """
        form = self._output.tools
        return self._templates.render(prompt, None if form is None else form.syntax)

    def encode(self, draft: Draft) -> list[int]:
        """Token ids of the part that is text.

        Raises:
            RequestError: the text is not valid Unicode, or has a token that the model does not know: the checkpoint's
                tokenizer is another model's, or has more tokens than the model.
        """
        ids = self._encode(draft) if draft.text else []
        highest = max(ids, default=0)
        if highest >= self._vocab_size:  # an executor would read behind the end of its embeddings
            text = self._tokenizer.token_text(highest)
            raise RequestError(
                f"'{text}' in {draft.param} is token {highest} of the tokenizer, but the model has tokens 0 to "
                f"{self._vocab_size - 1}",
                param=draft.param,
            )
        return ids

    def _encode(self, draft: Draft) -> list[int]:
        if draft.lead:
            first, *rest = self._tokenizer.encode(draft.lead + draft.text)
            if first == self._tokenizer.token_id(draft.lead):
                return rest
        return self._tokenizer.encode(draft.text, add_special_tokens=draft.add_special_tokens)


def check_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises RequestError unless all ids are below `vocab_size`; `param` names the request's field."""
    try:
        ids = np.asarray(token_ids, dtype=np.int64)
    except OverflowError:
        ids = np.asarray([-1 if not 0 <= token < vocab_size else token for token in token_ids], dtype=np.int64)
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(wrong):
        at = int(wrong[0])
        raise RequestError(f"{param}[{at}] is {token_ids[at]}, but token ids are 0 to {vocab_size - 1}", param=param)
