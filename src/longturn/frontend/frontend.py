"""From a request for text to the engine and back: render, tokenise, hash, generate, detokenise, remember."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from longturn.config import PAGE_TOKENS
from longturn.engine.hashing import page_hashes, salt_key
from longturn.engine.records import EngineRequest, FinishReason, SamplingParams, pack_tokens
from longturn.errors import EngineDeadError
from longturn.frontend.chat_template import ChatTemplates
from longturn.frontend.conversation import ConversationMemory
from longturn.frontend.conversation_reuse import compare, reuse_of
from longturn.frontend.draft import Draft, Drafts, check_ids
from longturn.frontend.engine_client import EngineClient
from longturn.frontend.grammar_compiler import GrammarLimits
from longturn.frontend.grammar_vocabulary import end_token_ids, vocabulary_of
from longturn.frontend.output import OutputText
from longturn.frontend.parsers.output import OutputParser
from longturn.frontend.parsers.registry import AUTO, OutputFormat, output_format
from longturn.frontend.records import (
    ChatPrompt,
    Prompt,
    PromptIds,
    Reuse,
    TextChunk,
    TextPrompt,
    TextRequest,
    TokenPrompt,
)
from longturn.frontend.remembering import PreparedRequest, Rememberer
from longturn.frontend.request_grammar import RequestGrammars, failure_of
from longturn.frontend.tokenizer import Tokenizer, load_tokenizer
from longturn.frontend.validate import ModelLimits, check_prompt_tokens, check_request
from longturn.frontend.volatile import HeaderWatch
from longturn.source import ModelSource

_THREAD_CHARS = 16_384
"""Longer text is tokenised in a thread (about 4 ms of work and more), so that other streams keep their pace."""
_SEED_MASK = (1 << 63) - 1


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
        grammar_limits: GrammarLimits | None = None,
        headers: HeaderWatch | None = None,
        caches: bool = True,
    ) -> None:
        """
        Args:
            tokenizer: the model's.
            templates: its chat templates.
            engine: where tokens are computed.
            limits: what bounds a request.
            memory: what remembers conversations; one with the default bounds if None.
            output: how the model writes reasoning and tool calls; None leaves both in the text.
            grammar_limits: what one request's grammar may cost; the default limits if None.
            headers: what finds volatile parts of system prompts, and may move them; one that reports if None.
            caches: whether the engine keeps pages of finished requests.
        """
        self.tokenizer = tokenizer
        self.limits = limits
        self.memory = memory if memory is not None else ConversationMemory()
        self.engine = engine
        self._caches = caches
        self._output = output or OutputFormat()
        self._drafts = Drafts(tokenizer, templates, limits, self.memory, headers or HeaderWatch(), self._output)
        self._rememberer = Rememberer(self.memory, tokenizer, self._output)
        self._grammars = RequestGrammars(
            tokenizer,
            self._output,
            limits,
            lambda: vocabulary_of(tokenizer, limits.vocab_size, limits.eos_token_ids),
            grammar_limits,
        )

    @classmethod
    def of(
        cls,
        source: ModelSource,
        engine: EngineClient,
        memory: ConversationMemory | None = None,
        *,
        output: OutputFormat | None = None,
        reasoning_parser: str = AUTO,
        tool_parser: str = AUTO,
        grammar_limits: GrammarLimits | None = None,
        headers: HeaderWatch | None = None,
        caches: bool = True,
    ) -> Frontend:
        """The frontend of a checkpoint.

        Args:
            source: the checkpoint.
            engine: where its tokens are computed.
            memory: what remembers conversations; one with the default bounds if None.
            output: how the model writes reasoning and tool calls; what the next two say if None.
            reasoning_parser: name of a reasoning format, `none`, or `auto`: what architecture and template say.
            tool_parser: name of a tool format, `none`, or `auto`.
            grammar_limits: what one request's grammar may cost; the default limits if None.
            headers: what finds volatile parts of system prompts, and may move them; one that reports if None.
            caches: whether the engine keeps pages of finished requests.

        Raises:
            ModelError: its tokenizer or chat template is missing, damaged or not supported.
            ConfigError: there is no format of that name, or it does not go with the template.
        """
        tokenizer = load_tokenizer(source)
        limits = ModelLimits(source.max_context_tokens, source.vocab_size, end_token_ids(source, tokenizer))
        templates = ChatTemplates.of(tokenizer)
        output = output or output_format(
            source.architecture,
            templates.text,
            templates.shows_tools,
            reasoning=reasoning_parser,
            tools=tool_parser,
        )
        return cls(tokenizer, templates, engine, limits, memory, output, grammar_limits, headers=headers, caches=caches)

    # --- requests ----------------------------------------------------------------------------------------------------

    def prepare(self, request: TextRequest) -> PreparedRequest:
        """Check, render, tokenise and hash a request.

        Raises:
            RequestError: a value is out of range, the template refuses the messages, the prompt is empty or longer
                than the context, or the grammar cannot be compiled.
        """
        check_request(request, self.limits)
        draft = self._drafts.draft(request)
        grammar = self._grammars.compiled_now(request, draft.rendered)
        return self._prepared(request, draft, self._drafts.encode(draft), grammar)

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextChunk, None]:
        """Chunks of the answer as it is written; the last one has `finish` and `usage`.

        A chunk may have tokens and no text (half a character, the beginning of a stop string or of a tool call, a
        control token), and the first one may have neither: where a long prompt is still being computed, it tells how
        much of it was cached. Reasoning and tool calls are given apart where the request asks for it and the model has
        parsers for them.
        Closing the iterator ends the request in the engine.

        Raises:
            RequestError: as `prepare`, or the engine refuses the request; before the first chunk.
            EngineDeadError: the engine died.
            LongturnError: the engine failed on this request.
        """
        check_request(request, self.limits)
        draft = self._drafts.draft(request)
        grammar = await self._grammars.compiled(request, draft.rendered)
        if len(draft.text) > _THREAD_CHARS:
            ids = await asyncio.to_thread(self._drafts.encode, draft)
        else:
            ids = self._drafts.encode(draft)
        prepared = self._prepared(request, draft, ids, grammar)
        state = OutputText(
            self.tokenizer,
            request,
            prompt_tokens=prepared.prompt_tokens,
            diverged_at=prepared.compared.diverged_at,
            parser=OutputParser.of(self._output, request, prepared.rendered),
        )
        prompt_ids: PromptIds | None = PromptIds(prepared.engine_request.prompt)
        reuse: Reuse | None = None
        outputs = self.engine.generate(prepared.engine_request)
        try:
            async for output in outputs:
                if output.finish is FinishReason.ERROR:
                    raise failure_of(request, output.error)
                chunk = state.feed(output, prepared.engine_request.prompt)
                if reuse is None:
                    reuse = reuse_of(prepared.compared, output.cached_tokens, caches=self._caches)
                if chunk.finish is not None:
                    # Before the last chunk goes out: a slow reader must not keep a stopped request in the engine.
                    await _close(outputs)
                    self._rememberer.remember(request, prepared, state, chunk.finish)
                    if chunk.usage is not None:
                        usage = dataclasses.replace(chunk.usage, reuse_reason=reuse.reason)
                        chunk = dataclasses.replace(chunk, usage=usage)
                if prompt_ids is not None:
                    chunk = dataclasses.replace(chunk, prompt_token_ids=prompt_ids, reuse=reuse)
                    prompt_ids = None
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            await _close(outputs)
        raise EngineDeadError(f"the engine ended request {request.request_id} without a result")

    # --- text and tokens ---------------------------------------------------------------------------------------------

    async def tokenize(
        self,
        prompt: Prompt | str,
        *,
        add_special_tokens: bool = True,
        tenant: str | None = None,
        cache_salt: str | None = None,
    ) -> list[int]:
        """Token ids of a text or a conversation, as a generation request would have them if nothing were known of its
        earlier turns.

        Args:
            prompt: a prompt record, or plain text.
            add_special_tokens: for text: with the tokenizer's beginning-of-text token, if it has one.
            tenant: who asks: lines of a system prompt are moved as they are for this client.
            cache_salt: as in a request.

        Raises:
            RequestError: the text is not valid Unicode, or the template refuses the messages.
        """
        if isinstance(prompt, TokenPrompt):
            return list(prompt.token_ids)
        if isinstance(prompt, ChatPrompt):
            request = TextRequest("", prompt, SamplingParams(max_tokens=0), tenant=tenant, cache_salt=cache_salt)
            text, add_special_tokens = self._drafts.settled(prompt, request), False
        else:
            text = prompt.text if isinstance(prompt, TextPrompt) else prompt
        if len(text) <= _THREAD_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, control tokens included.

        Raises:
            RequestError: an id is out of range.
        """
        check_ids(token_ids, self.limits.vocab_size, "tokens")
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    # --- steps of a request ------------------------------------------------------------------------------------------

    def _prepared(self, request: TextRequest, draft: Draft, new_ids: list[int], grammar: str | None) -> PreparedRequest:
        ids = draft.ids + pack_tokens(new_ids)
        count = len(ids) // 4
        check_prompt_tokens(count, self.limits, draft.param)
        known = draft.hashes[: len(draft.ids) // 4 // PAGE_TOKENS]
        compared = compare(ids, draft.history, draft.found, draft.volatile, extends=draft.extends, edited=draft.edited)
        self.memory.hits += draft.extends
        if len(compared.known_hashes) > len(known):
            known = compared.known_hashes
        key = salt_key(request.cache_salt, request.tenant)
        engine_request = EngineRequest(
            request_id=request.request_id,
            prompt=ids,
            page_hashes=page_hashes(ids, key, known),
            sampling=self._sampling(request, count, grammar),
            session_id=request.session_id,
            priority=request.priority,
            hash_key=key,
        )
        return PreparedRequest(engine_request, count, compared, draft.history, draft.rendered)

    def _sampling(self, request: TextRequest, prompt_tokens: int, grammar: str | None) -> SamplingParams:
        sampling = request.sampling
        room = self.limits.max_context_tokens - prompt_tokens
        own_stops = () if request.ignore_eos and grammar is None else self.limits.eos_token_ids
        return dataclasses.replace(
            sampling,
            max_tokens=min(sampling.max_tokens or room, room),
            seed=sampling.seed & _SEED_MASK,
            stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *own_stops))),
            grammar=grammar,
        )


async def _close(iterator: AsyncIterator[Any]) -> None:
    """Close an async iterator that can be closed; closing it again does nothing."""
    aclose = getattr(iterator, "aclose", None)
    if aclose is not None:
        await aclose()
