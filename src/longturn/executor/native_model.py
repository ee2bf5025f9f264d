"""Packed weights in native code on the CPU executor: one call a step, no torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from longturn.executor.rows import StepInputs
from longturn.kernels.cpu.native import NativeDecoder


class NativeCpuModel:
    """Implements `executor.cpu.CpuModel` over the C++ decoder and its page pool."""

    def __init__(self, decoder: NativeDecoder, *, pages: int, max_context_tokens: int, isa: str) -> None:
        self._decoder = decoder
        self._cache = decoder.new_cache(pages)
        self.vocab_size = decoder.config.vocab
        self.max_context_tokens = max_context_tokens
        self.pages = pages
        self.page_bytes = decoder.page_bytes
        self.description = f"cpu (packed weights, {isa}, {decoder.config.threads} threads)"

    @property
    def storage(self) -> npt.NDArray[np.uint8]:
        """[pages, page_bytes]: the page pool's own memory."""
        return self._cache.reshape(self.pages, -1).view(np.uint8)

    def logits(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        logits, _ = self._forward(inputs, logits=True)
        assert logits is not None
        return logits

    def greedy(self, inputs: StepInputs) -> npt.NDArray[np.int32]:
        _, best = self._forward(inputs, logits=False)
        assert best is not None
        return best

    def _forward(
        self, inputs: StepInputs, *, logits: bool
    ) -> tuple[npt.NDArray[np.float32] | None, npt.NDArray[np.int32] | None]:
        rows = np.repeat(inputs.rows, np.diff(inputs.query_starts))
        return self._decoder.forward(
            inputs.tokens,
            inputs.positions,
            rows,
            inputs.page_tables,
            inputs.sample_index,
            self._cache,
            logits=logits,
            argmax=not logits,
        )

    def close(self) -> None:
        self._decoder.close()
