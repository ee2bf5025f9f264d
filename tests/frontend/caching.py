"""An engine with a page cache that forgets nothing, and whose answers a test writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from longturn.config import PAGE_TOKENS
from longturn.engine.hashing import page_hashes
from longturn.engine.records import EngineRequest, FinishReason, RequestOutput, pack_tokens
from tests.frontend.fakes import FakeEngine, outputs_of


class CachingEngine(FakeEngine):
    """Answers with the tokens that `write` gives; every page that was computed stays."""

    def __init__(self, write: Callable[[], Sequence[int]], end: int | None) -> None:
        super().__init__(self._answer)
        self.write = write
        self.end = end
        self.pages: set[bytes] = set()
        self.left: list[list[int]] = []
        """Of each request: all tokens of its prompt and its answer, the end token too."""

    def _answer(self, request: EngineRequest) -> list[RequestOutput]:
        cached = 0
        for page_hash in request.page_hashes[: (len(request.prompt) // 4 - 1) // PAGE_TOKENS]:
            if page_hash not in self.pages:
                break
            cached += PAGE_TOKENS
        ids = list(self.write())
        whole = request.prompt + pack_tokens(ids if self.end is None else [*ids, self.end])
        # The last token was sampled and never computed.
        self.pages.update(page_hashes(whole[:-4], request.hash_key))
        self.left.append(memoryview(whole).cast("i").tolist())
        finish = FinishReason.LENGTH if self.end is None else FinishReason.STOP
        return outputs_of(request, ids, finish, stop_token_id=self.end, cached_tokens=cached)
