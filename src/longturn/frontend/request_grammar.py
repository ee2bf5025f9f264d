"""What a request's answer must be, as one grammar: what the request asks for, what its tools do, where both begin."""

from __future__ import annotations

from collections.abc import Callable, Collection

from longturn.errors import LongturnError, RequestError
from longturn.frontend import grammar
from longturn.frontend.grammar import GrammarSpec
from longturn.frontend.grammar_compiler import GrammarCompiler, GrammarLimits
from longturn.frontend.grammar_reasoning import ReasoningMarks
from longturn.frontend.grammar_vocabulary import reasoning_marks
from longturn.frontend.parsers.registry import OutputFormat
from longturn.frontend.parsers.tool_grammar import tool_grammar
from longturn.frontend.records import ChatPrompt, TextRequest
from longturn.frontend.tokenizer import Tokenizer
from longturn.frontend.validate import ModelLimits
from longturn.grammar_library import CANNOT_FOLLOW, Vocabulary

_ENDLESS = 1 << 22
"""Tokens: more than any context has."""


class RequestGrammars:
    """Grammars of one model's requests."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        output: OutputFormat,
        limits: ModelLimits,
        vocabulary: Callable[[], Vocabulary],
        grammar_limits: GrammarLimits | None,
    ) -> None:
        """
        Args:
            tokenizer: the model's.
            output: how the model writes reasoning and tool calls.
            limits: what bounds a request.
            vocabulary: the model's; called when the first grammar comes.
            grammar_limits: what one request's grammar may cost; the default limits if None.
        """
        self._tokenizer = tokenizer
        self._output = output
        self._limits = limits
        self._compiler = GrammarCompiler(vocabulary, grammar_limits)

    async def compiled(self, request: TextRequest, rendered: str) -> str | None:
        """The text of `SamplingParams.grammar`; None where an answer may be anything.

        Args:
            request: what is asked for.
            rendered: its prompt; a template may open the reasoning at its end.

        Raises:
            RequestError: the grammar cannot be compiled, or the request asks for what cannot both be.
            OverloadedError: too many grammars are being tried.
        """
        spec = self._spec(request)
        return None if spec is None else await self._compiler.compile(spec, self._marks(request, rendered))

    def compiled_now(self, request: TextRequest, rendered: str) -> str | None:
        """As `compiled`, and waits for it."""
        spec = self._spec(request)
        return None if spec is None else self._compiler.compile_now(spec, self._marks(request, rendered))

    def _spec(self, request: TextRequest) -> GrammarSpec | None:
        prompt, form = request.prompt, self._output
        spec = request.grammar
        if request.parse_tools and isinstance(prompt, ChatPrompt):
            marks = form.tools.markers if form.tools else ()
            special = self._tokenizer.special_ids
            tokens = {mark: token for mark in marks if (token := self._tokenizer.token_id(mark)) in special}
            spec = tool_grammar(
                None if form.tools is None else form.tools.grammar,
                prompt.callable_tools,
                request.tool_choice,
                {mark: token for mark, token in tokens.items() if token is not None},
                request.grammar,
                may_open_lines=form.reasoning is not None and form.reasoning.spaced,
                reasoning_open=None if form.reasoning is None else form.reasoning.markers[0],
            )
        if request.allowed_token_ids is None:
            return spec
        if spec is not None:
            raise RequestError(
                f"'allowed_token_ids' cannot be given together with '{spec.param}'",
                param="allowed_token_ids",
                code="invalid_value",
            )
        return tokens_grammar(request.allowed_token_ids, self._limits.eos_token_ids)

    def _marks(self, request: TextRequest, rendered: str) -> ReasoningMarks | None:
        """How this chat's answer may reason before its grammar begins; None where the model does not."""
        form = self._output.reasoning
        if form is None or request.allowed_token_ids is not None or not isinstance(request.prompt, ChatPrompt):
            return None
        return reasoning_marks(form, self._tokenizer, rendered)


def tokens_grammar(allowed: Collection[int], end_ids: Collection[int]) -> GrammarSpec:
    """Answers of these tokens alone. They end by themselves only if an end token is one of them."""
    ids, ranges = sorted(set(allowed).difference(end_ids)), []
    begin = 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or ids[at] != ids[at - 1] + 1:
            ranges.append(f"{ids[begin]}-{ids[at - 1]}")
            begin = at
    times = "*" if any(token in allowed for token in end_ids) else f"{{{_ENDLESS}}}"
    rule = f"token{times}\ntoken: <[{','.join(ranges)}]>" if ranges else '""'
    return grammar.lark(f"start: {rule}", param="allowed_token_ids")


def failure_of(request: TextRequest, cause: str | None) -> LongturnError:
    """Why the engine ended a request with an error, as its client shall see it."""
    if request.grammar is not None and cause is not None and cause.startswith(CANNOT_FOLLOW):
        # The request's own doing: a grammar may compile and turn out too large for the library at a later token.
        return RequestError(f"'{request.grammar.param}': {cause}", param=request.grammar.param, code="invalid_value")
    return LongturnError(f"request {request.request_id} failed: {cause or 'no cause given'}")
