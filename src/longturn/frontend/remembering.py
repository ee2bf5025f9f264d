"""What stays of a request when it has ended: the turn that its conversation's next prompt continues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longturn.engine.hashing import page_hashes, salt_key
from longturn.engine.records import EngineRequest, FinishReason, pack_tokens
from longturn.frontend.conversation import ConversationMemory
from longturn.frontend.conversation_ids import Form, Turn, bare_form, text_digest
from longturn.frontend.conversation_keys import History, text_key
from longturn.frontend.conversation_reuse import Comparison
from longturn.frontend.output import OutputText
from longturn.frontend.parsers.registry import OutputFormat
from longturn.frontend.records import ChatPrompt, TextRequest
from longturn.frontend.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request as the engine gets it, and what the frontend needs when it ends."""

    engine_request: EngineRequest
    prompt_tokens: int
    compared: Comparison
    history: History | None
    rendered: str


class Rememberer:
    """Keeps the turns of one model's conversations."""

    def __init__(self, memory: ConversationMemory, tokenizer: Tokenizer, output: OutputFormat) -> None:
        """`output`: how the model writes reasoning."""
        self._memory = memory
        self._tokenizer = tokenizer
        self._output = output

    def remember(
        self, request: TextRequest, prepared: PreparedRequest, state: OutputText, finish: FinishReason
    ) -> None:
        """Keep what a request has written, if a later one may continue it."""
        prompt, history = request.prompt, prepared.history
        if history is None or (isinstance(prompt, ChatPrompt) and not prompt.add_generation_prompt):
            return
        if finish not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        kept, text = state.kept()
        message = state.message()
        end_text = ""
        if state.stop_token_id is not None and (end_text := self._tokenizer.special_text(state.stop_token_id)):
            kept = [*kept, state.stop_token_id]
        if not isinstance(prompt, ChatPrompt) and not end_text:
            return  # see `text_history`
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
            arguments=tuple(call["function"]["arguments"] for call in message.get("tool_calls", ())),
            tools=history.tools,
            template_arguments=history.arguments,
            bare=self._bare(prepared.rendered, text, message) if isinstance(prompt, ChatPrompt) else None,
        )
        if isinstance(prompt, ChatPrompt):
            self._memory.remember(history, message, turn)
        else:
            self._memory.remember(history, text_key(prepared.rendered + text + end_text, history.scope), turn)

    def _bare(self, rendered: str, text: str, message: Mapping[str, Any]) -> Form | None:
        form = self._output.reasoning
        if form is None or len(form.markers) != 2 or str(message.get("reasoning_content", "")).strip():
            return None
        return bare_form(rendered, text, *form.markers)
