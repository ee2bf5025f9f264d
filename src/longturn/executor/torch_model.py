"""A torch model on the CPU executor: exact fp32 arithmetic, and the twin of every faster path."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from longturn.config import PAGE_TOKENS
from longturn.executor.rows import StepInputs
from longturn.models.base import CausalModel, ModelStep
from longturn.ops.attention import PagedRows


class TorchCpuModel:
    """Implements `executor.cpu.CpuModel` over a `models.base.CausalModel` and its page pool."""

    def __init__(self, model: CausalModel, *, pages: int, max_context_tokens: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model = model
        self._cache = model.kv.allocate(pages)
        self.vocab_size = model.vocab_size
        self.max_context_tokens = max_context_tokens
        self.pages = pages
        self.page_bytes = model.kv.page_bytes
        self.description = f"cpu (torch fp32, {threads} threads)"

    @property
    def storage(self) -> npt.NDArray[np.uint8]:
        """[pages, page_bytes]: the page pool's own memory."""
        storage: npt.NDArray[np.uint8] = self._cache.numpy()
        return storage

    def logits(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        ends = inputs.query_starts[1:] - 1
        contexts = inputs.positions[ends] + 1
        used = -(-int(contexts.max()) // PAGE_TOKENS)
        step = ModelStep(
            token_ids=torch.from_numpy(inputs.tokens),
            positions=torch.from_numpy(inputs.positions),
            rows=PagedRows(
                query_starts=torch.from_numpy(inputs.query_starts),
                context_tokens=torch.from_numpy(contexts),
                page_table=torch.from_numpy(inputs.page_tables[inputs.rows, :used]),
            ),
        )
        hidden = self._model.forward(step, self._cache)
        if not len(inputs.sample_index):
            return np.empty((0, self.vocab_size), np.float32)
        result: npt.NDArray[np.float32] = self._model.logits(hidden[torch.from_numpy(inputs.sample_index)]).numpy()
        return result

    def greedy(self, inputs: StepInputs) -> npt.NDArray[np.int32]:
        logits = self.logits(inputs)
        best: npt.NDArray[np.int32] = logits.argmax(axis=-1).astype(np.int32)
        # argmax returns the first NaN's place if there is one
        best[np.isnan(np.take_along_axis(logits, best[:, None], axis=-1))[:, 0]] = -1
        return best

    def close(self) -> None:
        self._cache = torch.empty(0, dtype=torch.uint8)
