"""From a request for text to the engine and back: render, tokenise, hash, generate, detokenise, remember."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longturn.config import PAGE_TOKENS
from longturn.engine.hashing import page_hashes, salt_key
from longturn.engine.records import EngineRequest, FinishReason, SamplingParams, pack_tokens, unpack_tokens
from longturn.errors import EngineDeadError, LongturnError, RequestError
from longturn.frontend.chat_template import ChatTemplates, with_reasoning
from longturn.frontend.conversation import (
    ConversationMemory,
    Found,
    History,
    Turn,
    common_tokens,
    continuation,
    history_of,
    text_digest,
)
from longturn.frontend.engine_client import EngineClient
from longturn.frontend.output import OutputText
from longturn.frontend.parsers.output import OutputParser
from longturn.frontend.parsers.registry import OutputFormat, output_format
from longturn.frontend.records import ChatPrompt, Prompt, TextChunk, TextPrompt, TextRequest, TokenPrompt
from longturn.frontend.tokenizer import Tokenizer, load_tokenizer
from longturn.frontend.validate import ModelLimits, check_prompt_tokens, check_request
from longturn.source import ModelSource

_THREAD_CHARS = 16_384
"""Longer text is tokenised in a thread (about 4 ms of work and more), so that other streams keep their pace."""
_SEED_MASK = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class _Draft:
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
    """A chat's whole prompt text."""
    history: History | None = None
    found: Found | None = None


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request as the engine gets it, and what the frontend needs when it ends."""

    engine_request: EngineRequest
    prompt_tokens: int
    diverged_at: int | None
    history: History | None
    rendered: str


class Frontend:
    """One model's text side. Its methods are to be called from one event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: ChatTemplates,
        engine: EngineClient,
        limits: ModelLimits,
        memory: ConversationMemory | None = None,
        output: OutputFormat | None = None,
    ) -> None:
        """
        Args:
            tokenizer: the model's.
            templates: its chat templates.
            engine: where tokens are computed.
            limits: what bounds a request.
            memory: what remembers conversations; one with the default bounds if None.
            output: how the model writes reasoning and tool calls; None leaves both in the text.
        """
        self.tokenizer = tokenizer
        self.limits = limits
        self.memory = memory if memory is not None else ConversationMemory()
        self.engine = engine
        self._templates = templates
        self._output = output or OutputFormat()

    @classmethod
    def of(
        cls,
        source: ModelSource,
        engine: EngineClient,
        memory: ConversationMemory | None = None,
        *,
        output: OutputFormat | None = None,
    ) -> Frontend:
        """The frontend of a checkpoint.

        Args:
            source: the checkpoint.
            engine: where its tokens are computed.
            memory: what remembers conversations; one with the default bounds if None.
            output: how the model writes reasoning and tool calls; what its architecture says if None.

        Raises:
            ModelError: its tokenizer or chat template is missing, damaged or not supported.
        """
        tokenizer = load_tokenizer(source)
        eos = dict.fromkeys(source.eos_token_ids)
        if tokenizer.eos_id is not None:
            eos[tokenizer.eos_id] = None
        limits = ModelLimits(source.max_context_tokens, source.vocab_size, tuple(eos))
        output = output or output_format(source.architecture)
        return cls(tokenizer, ChatTemplates.of(tokenizer), engine, limits, memory, output)

    # --- requests ----------------------------------------------------------------------------------------------------

    def prepare(self, request: TextRequest) -> PreparedRequest:
        """Check, render, tokenise and hash a request.

        Raises:
            RequestError: a value is out of range, the template refuses the messages, or the prompt is empty or longer
                than the context.
        """
        check_request(request, self.limits)
        draft = self._draft(request)
        return self._prepared(request, draft, self._encode(draft))

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextChunk, None]:
        """Chunks of the answer as it is written; the last one has `finish` and `usage`.

        A chunk may have tokens and no text (half a character, the beginning of a stop string or of a tool call, a
        control token). Reasoning and tool calls are given apart where the request asks for it and the model has
        parsers for them.
        Closing the iterator ends the request in the engine.

        Raises:
            RequestError: as `prepare`, or the engine refuses the request; before the first chunk.
            EngineDeadError: the engine died.
            LongturnError: the engine failed on this request.
        """
        check_request(request, self.limits)
        draft = self._draft(request)
        if len(draft.text) > _THREAD_CHARS:
            ids = await asyncio.to_thread(self._encode, draft)
        else:
            ids = self._encode(draft)
        prepared = self._prepared(request, draft, ids)
        state = OutputText(
            self.tokenizer,
            request,
            prompt_tokens=prepared.prompt_tokens,
            diverged_at=prepared.diverged_at,
            parser=OutputParser.of(self._output, request, prepared.rendered),
        )
        prompt_ids: tuple[int, ...] | None = tuple(unpack_tokens(prepared.engine_request.prompt))
        outputs = self.engine.generate(prepared.engine_request)
        try:
            async for output in outputs:
                if output.finish is FinishReason.ERROR:
                    raise LongturnError(f"request {request.request_id} failed: {output.error or 'no cause given'}")
                chunk = state.feed(output)
                if chunk.finish is not None:
                    # Before the last chunk goes out: a slow reader must not keep a stopped request in the engine.
                    await _close(outputs)
                    self._remember(request, prepared, state, chunk.finish)
                if prompt_ids is not None:
                    chunk = dataclasses.replace(chunk, prompt_token_ids=prompt_ids)
                    prompt_ids = None
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            await _close(outputs)
        raise EngineDeadError(f"the engine ended request {request.request_id} without a result")

    # --- text and tokens ---------------------------------------------------------------------------------------------

    async def tokenize(self, prompt: Prompt | str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text or a conversation, as a generation request would have them.

        Args:
            prompt: a prompt record, or plain text.
            add_special_tokens: for text: with the tokenizer's beginning-of-text token, if it has one.

        Raises:
            RequestError: the text is not valid Unicode, or the template refuses the messages.
        """
        if isinstance(prompt, TokenPrompt):
            return list(prompt.token_ids)
        if isinstance(prompt, ChatPrompt):
            text, add_special_tokens = self._templates.render(prompt), False
        else:
            text = prompt.text if isinstance(prompt, TextPrompt) else prompt
        if len(text) <= _THREAD_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids.

        Raises:
            RequestError: an id is out of range.
        """
        _check_ids(token_ids, self.limits.vocab_size, "tokens")
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    # --- steps of a request ------------------------------------------------------------------------------------------

    def _draft(self, request: TextRequest) -> _Draft:
        prompt = request.prompt
        if isinstance(prompt, TokenPrompt):
            _check_ids(prompt.token_ids, self.limits.vocab_size, "prompt")
            return _Draft("", "prompt", ids=pack_tokens(prompt.token_ids))
        if isinstance(prompt, TextPrompt):
            return _Draft(prompt.text, "prompt", add_special_tokens=True)
        rendered = self._templates.render(prompt)
        history = history_of(
            prompt, tenant=request.tenant, cache_salt=request.cache_salt, session_id=request.session_id
        )
        if (restored := with_reasoning(prompt, self.memory.reasoning(history))) is not None:
            rendered = self._templates.render(restored)
        found = self.memory.find(history)
        plain = _Draft(rendered, "messages", rendered=rendered, history=history, found=found)
        turn = found.turn
        if turn is None or (rest := continuation(turn, rendered)) is None:
            return plain
        stays, text = rest
        ids = turn.ids if stays or not turn.end_text else turn.ids[:-4]
        if not stays and self.tokenizer.adds_prefix_space and self.tokenizer.special_prefix(text) is None:
            return plain  # tokenised by itself the new part would get a space that the conversation does not have
        return dataclasses.replace(
            plain, text=text, ids=ids, hashes=turn.page_hashes, lead=turn.end_text if stays else ""
        )

    def _encode(self, draft: _Draft) -> list[int]:
        if not draft.text:
            return []
        if draft.lead:
            first, *rest = self.tokenizer.encode(draft.lead + draft.text)
            if first == self.tokenizer.token_id(draft.lead):
                return rest
        return self.tokenizer.encode(draft.text, add_special_tokens=draft.add_special_tokens)

    def _prepared(self, request: TextRequest, draft: _Draft, new_ids: list[int]) -> PreparedRequest:
        ids = draft.ids + pack_tokens(new_ids)
        count = len(ids) // 4
        check_prompt_tokens(count, self.limits, draft.param)
        known = draft.hashes[: len(draft.ids) // 4 // PAGE_TOKENS]
        diverged_at = None
        found = draft.found
        if found is not None and draft.ids and found.is_last:
            self.memory.hits += 1
        elif found is not None and (before := found.turn if found.is_last else found.latest) is not None:
            common = common_tokens(ids, before.ids)
            if common < len(before.ids) // 4:
                diverged_at = common
                self.memory.divergences += 1
            if common // PAGE_TOKENS > len(known):
                known = before.page_hashes[: common // PAGE_TOKENS]
        key = salt_key(request.cache_salt, request.tenant)
        engine_request = EngineRequest(
            request_id=request.request_id,
            prompt=ids,
            page_hashes=page_hashes(ids, key, known),
            sampling=self._sampling(request, count),
            session_id=request.session_id,
            priority=request.priority,
            hash_key=key,
        )
        return PreparedRequest(engine_request, count, diverged_at, draft.history, draft.rendered)

    def _sampling(self, request: TextRequest, prompt_tokens: int) -> SamplingParams:
        sampling = request.sampling
        room = self.limits.max_context_tokens - prompt_tokens
        own_stops = () if request.ignore_eos else self.limits.eos_token_ids
        return dataclasses.replace(
            sampling,
            max_tokens=min(sampling.max_tokens or room, room),
            seed=sampling.seed & _SEED_MASK,
            stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *own_stops))),
        )

    def _remember(
        self, request: TextRequest, prepared: PreparedRequest, state: OutputText, finish: FinishReason
    ) -> None:
        prompt, history = request.prompt, prepared.history
        if history is None or not isinstance(prompt, ChatPrompt) or not prompt.add_generation_prompt:
            return
        if finish not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        kept, text = state.kept()
        message = state.message()
        end_text = ""
        if state.stop_token_id is not None and (end_text := self.tokenizer.special_text(state.stop_token_id)):
            kept = [*kept, state.stop_token_id]
        ids = prepared.engine_request.prompt + pack_tokens(kept)
        key = salt_key(request.cache_salt, request.tenant)
        turn = Turn(
            ids=ids,
            page_hashes=page_hashes(ids, key, prepared.engine_request.page_hashes),
            prompt_chars=len(prepared.rendered),
            prompt_digest=text_digest(prepared.rendered),
            text=text,
            end_text=end_text,
            reasoning=message.get("reasoning_content", ""),
        )
        self.memory.remember(history, message, turn)


def _check_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    try:
        ids = np.asarray(token_ids, dtype=np.int64)
    except OverflowError:
        ids = np.asarray([-1 if not 0 <= token < vocab_size else token for token in token_ids], dtype=np.int64)
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(wrong):
        at = int(wrong[0])
        raise RequestError(f"{param}[{at}] is {token_ids[at]}, but token ids are 0 to {vocab_size - 1}", param=param)


async def _close(iterator: AsyncIterator[Any]) -> None:
    """Close an async iterator that can be closed; closing it again does nothing."""
    aclose = getattr(iterator, "aclose", None)
    if aclose is not None:
        await aclose()
