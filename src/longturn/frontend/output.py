"""Engine outputs of one request to text chunks: detokenising, stop strings, parsers, log-probabilities, usage."""

from __future__ import annotations

from typing import Any

from longturn.engine.records import FinishReason, RequestOutput, TokenLogprobs, unpack_tokens
from longturn.frontend.detokenizer import Detokenizer
from longturn.frontend.parsers.output import OutputParser, OutputPiece
from longturn.frontend.records import (
    PromptLogprobs,
    TextChunk,
    TextPrompt,
    TextRequest,
    TokenLogprob,
    TokenPrompt,
    Usage,
)
from longturn.frontend.stop import StopFinder, StopResult
from longturn.frontend.tokenizer import Tokenizer


class OutputText:
    """State of one request's output."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: TextRequest,
        *,
        prompt_tokens: int,
        diverged_at: int | None,
        parser: OutputParser | None = None,
    ) -> None:
        self._parser = parser
        self._tokenizer = tokenizer
        self._prompt_tokens = prompt_tokens
        self._diverged_at = diverged_at
        self._min_tokens = request.sampling.min_tokens
        continues = isinstance(request.prompt, (TextPrompt, TokenPrompt))
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=request.skip_special_tokens,
            continues=continues,
            keep=() if parser is None else parser.markers,
        )
        self._stops = StopFinder(request.stop, include_stop_text=request.include_stop_text)
        self._parts: list[str] = []
        self._chars = 0
        self._ends: list[int] = []
        self._marks: list[int] = []
        """Characters of text after each token, unfinished ones not counted."""
        self._ids: list[int] = []
        self._cached_tokens = 0
        self._cut = False
        self._scores = request.sampling.prompt_logprobs is not None
        self._prompt_logprobs: list[TokenLogprobs] = []
        self.stop_token_id: int | None = None
        """The stop token that the engine sampled at the end, if the output ended so."""

    def feed(self, output: RequestOutput, prompt: bytes = b"") -> TextChunk:
        """The chunk for one engine output. It has `finish` when the output is over, which a stop string may make it.

        `prompt`: token ids, int32 little-endian; for requests that ask for its log-probabilities.
        """
        self._prompt_logprobs += output.prompt_logprobs
        self._cached_tokens = max(self._cached_tokens, output.cached_tokens)
        parts: list[str] = []
        finish, stop, used = output.finish, None, 0
        for token_id in output.token_ids:
            used += 1
            self._ids.append(token_id)
            piece = self._detokenizer.push(token_id)
            self._chars += len(piece)
            self._marks.append(self._chars)
            # Where a character is unfinished no text ends with this token, so the output cannot be cut behind it.
            self._ends.append(self._chars if self._detokenizer.whole else -1)
            result = self._find(piece)
            parts.append(result.text)
            if result.stop is not None:
                finish, stop = FinishReason.STOP, result.stop
                break
        if stop is None and finish is not None:
            result = self._find(self._detokenizer.flush())
            stop = result.stop
            parts.append(result.text if stop is not None else result.text + self._stops.flush())
            if stop is None:
                self.stop_token_id = output.stop_token_id
            else:
                finish = FinishReason.STOP
        self._cut = stop is not None
        text = "".join(parts)
        if text:
            self._parts.append(text)
        parsed = self._parsed(text, last=finish is not None)
        return TextChunk(
            text=parsed.content,
            reasoning=parsed.reasoning,
            tool_calls=parsed.calls,
            behind_calls=parsed.behind,
            token_ids=output.token_ids[:used],
            logprobs=tuple(map(self._logprob, output.token_ids[:used], output.logprobs)),
            finish=finish,
            stop_text=stop,
            usage=None if finish is None else self._usage(),
            times=output.times,
            prompt_logprobs=self._scored(prompt) if output.token_ids or finish is not None else None,
        )

    @property
    def text(self) -> str:
        """All text so far, as the model wrote it."""
        return "".join(self._parts)

    def message(self) -> dict[str, Any]:
        """The whole answer as the message that the client will send back."""
        return {"role": "assistant", "content": self.text} if self._parser is None else self._parser.message()

    def kept(self) -> tuple[list[int], str]:
        """The output tokens that the text keeps, and the text that exactly these stand for.

        A stop string may begin inside a token: then the text ends after the tokens do, by less than a token.
        """
        text = self.text
        if not self._cut:
            return self._ids, text
        for count in range(len(self._ids), 0, -1):
            if 0 <= (end := self._ends[count - 1]) <= len(text):
                return self._ids[:count], text[:end]
        return [], ""

    def _find(self, piece: str) -> StopResult:
        # As elsewhere, stop strings end nothing before `min_tokens`.
        return StopResult(piece) if len(self._ids) < self._min_tokens else self._stops.push(piece)

    def _parsed(self, text: str, *, last: bool) -> OutputPiece:
        if self._parser is None:
            return OutputPiece(text)
        piece = self._parser.push(text)
        if not last:
            return piece
        rest = self._parser.finish()
        return OutputPiece(
            piece.content + rest.content,
            piece.reasoning + rest.reasoning,
            (*piece.calls, *rest.calls),
            piece.behind + rest.behind,
        )

    def _reasoning_tokens(self) -> int:
        """Tokens that have text in the reasoning; those of its markers alone do not count."""
        first, end = (0, 0) if self._parser is None else self._parser.reasoning_span
        if first >= end:
            return 0
        begins = [0, *self._marks]
        # A token without text of its own (a part of a character) counts where its character will stand.
        return sum(
            begin < end and (mark > first or begin == mark == first)
            for begin, mark in zip(begins, self._marks, strict=False)
        )

    def _scored(self, prompt: bytes) -> PromptLogprobs | None:
        """The prompt's log-probabilities, once."""
        if not self._scores:
            return None
        self._scores = False
        ids, found = unpack_tokens(prompt), self._prompt_logprobs
        self._prompt_logprobs = []
        # An answer that ended before its prompt was computed has fewer.
        tokens = tuple(map(self._logprob, ids[1:], found))
        return PromptLogprobs(ids[0], self._tokenizer.token_text(ids[0]), tokens)

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(self._ids) + (self.stop_token_id is not None),
            cached_tokens=self._cached_tokens,
            diverged_at=self._diverged_at,
            reasoning_tokens=self._reasoning_tokens(),
        )

    def _logprob(self, token_id: int, logprobs: TokenLogprobs) -> TokenLogprob:
        tokenizer = self._tokenizer
        return TokenLogprob(
            token_id=token_id,
            text=tokenizer.token_text(token_id),
            token_bytes=tokenizer.token_bytes(token_id),
            logprob=logprobs.token,
            rank=logprobs.rank,
            top=tuple(
                (top_id, tokenizer.token_text(top_id), tokenizer.token_bytes(top_id), value)
                for top_id, value in zip(logprobs.top_ids, logprobs.top, strict=True)
            ),
        )
