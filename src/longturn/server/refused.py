"""Request fields of OpenAI's and vLLM's APIs that would change the answer and are not done here: refused by name.

They are declared in `openai_types`, since msgspec ignores what it does not know, as every OpenAI-compatible server
does. What changes no answer is not declared: it is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longturn.errors import RequestError

REFUSED: Mapping[str, str] = {
    "use_beam_search": "beam search is not supported",
    "bad_words": "it is not supported; 'logit_bias' makes tokens unlikely",
    "logits_processors": "code from requests is not run",
    "truncate_prompt_tokens": "prompts are not cut; send less",
    "thinking_token_budget": "a limit for the reasoning alone is not supported",
    "repetition_detection": "it is not supported",
    "kv_transfer_params": "transfer of cached pages between servers is not supported",
    "return_tokens_as_token_ids": "it is not supported; 'return_token_ids' gives ids beside the text",
    "prompt_embeds": "prompts are texts or token ids",
    "web_search_options": "there is no web search",
    "moderation": "there is no moderation",
    "documents": "it is not supported; write documents into a message",
    "add_special_tokens": "the chat template writes the special tokens",
    "chat_template": "the template is the model's own",
    "continue_final_message": "continuing the last message is not supported",
    "suffix": "filling in the middle is not supported",
}
"""Field -> why."""


def check_refused(request: Any) -> None:
    """Raises RequestError if a field of `request` asks for what is not done; values that ask for nothing pass."""
    for name, why in REFUSED.items():
        value = getattr(request, name, None)
        # 0 asks for something: `prompt_logprobs: 0` is the log-probability of each token alone.
        if value is None or value is False or (not isinstance(value, int | float) and not value):
            continue
        raise RequestError(f"'{name}': {why}", param=name, code="unsupported_value")
