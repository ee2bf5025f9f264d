"""Log-probabilities as OpenAI's APIs and vLLM's extension of them write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from longturn.frontend.records import PromptLogprobs, TokenLogprob


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""
    return {"content": [_chat_token(token) for token in tokens], "refusal": None}


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.token_bytes),
        "top_logprobs": [
            {"token": text, "logprob": logprob, "bytes": list(data)} for _, text, data, logprob in token.top
        ],
    }


def completion_logprobs(
    tokens: Sequence[TokenLogprob], offset: int, prompt: PromptLogprobs | None = None
) -> dict[str, Any]:
    """The `logprobs` of a text choice.

    Args:
        tokens: of the text.
        offset: character at which the first of them starts.
        prompt: tokens before them, which the text then begins with; the first of all has no log-probability.
    """
    texts: list[str] = [] if prompt is None else [prompt.first_text]
    values: list[float | None] = [None] * len(texts)
    tops: list[dict[str, float] | None] = [None] * len(texts)
    for token in (*(() if prompt is None else prompt.tokens), *tokens):
        texts.append(token.text)
        values.append(token.logprob)
        # Tokens with equal texts (halves of characters) share a key: the likeliest, which comes first, keeps it.
        tops.append({token.text: token.logprob} | {text: logprob for _, text, _, logprob in reversed(token.top)})
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def prompt_logprobs(prompt: PromptLogprobs) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token but the first, the likeliest ones and itself by their ids."""
    return [None, *map(_by_id, prompt.tokens)]


def _by_id(token: TokenLogprob) -> dict[str, Any]:
    found = {
        str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": text}
        for rank, (token_id, text, _, logprob) in enumerate(token.top, 1)
    }
    own = {"logprob": token.logprob, "rank": token.rank, "decoded_token": token.text}
    return {str(token.token_id): own, **found}
