"""The part of an executor's start that needs no weights, done while they are loaded."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import torch

from longturn.executor.gpu.compile import Compilation, Kernel
from longturn.executor.gpu.steps import DeviceSteps, GpuLimits
from longturn.kernels.moe_many_shared import shared_apart_pays
from longturn.kernels.packed_weights import WeightFormat
from longturn.models.minimax_m3_config import MiniMaxM3Config
from longturn.models.minimax_m3_gpu import MiniMaxM3Gpu, warm_layers
from longturn.models.minimax_m3_gpu_plans import GpuPlans
from longturn.models.minimax_m3_gpu_weights import random_gpu_weights

_log = logging.getLogger(__name__)


class EarlyWork:
    """What an executor's start needs and can be done before its weights are there: its kernels are compiled in other
    processes, and the vendor's library loads those that it multiplies with, a second or more of reading from disk."""

    def __init__(
        self,
        c: MiniMaxM3Config,
        pages: int,
        limits: GpuLimits,
        *,
        experts: WeightFormat = WeightFormat.PLAIN,
        others: WeightFormat = WeightFormat.PLAIN,
        kv_dtype: torch.dtype = torch.bfloat16,
        masked: bool = False,
        plans: GpuPlans | None = None,
    ) -> None:
        """Begins at once.

        Args:
            c: the model, `experts` and `others` the formats of its weights, `kv_dtype` that of its cache.
            pages: of its pool.
            limits: of the executor.
            masked: it has a vocabulary.
            plans: the model's.
        """
        begin = time.perf_counter()
        few = warm_layers(c)
        like = random_gpu_weights(c, device="meta", experts=experts, others=others, kv_dtype=kv_dtype, layers=few)
        steps = DeviceSteps(MiniMaxM3Gpu(like, pages, plans), limits, masked=masked)
        kernels: list[Kernel] = []
        try:
            kernels = steps.all_kernels(torch.cuda.get_device_capability())
        except Exception as error:  # a launch that looks at more of a tensor than there is without memory
            _log.warning("kernels are compiled when weights are loaded: %s: %s", type(error).__name__, error)
        noted = time.perf_counter()
        self._compilation = Compilation(kernels) if kernels else None  # forks, and so comes before the thread
        rows = {layer.projection.shape[0] for layer in like.layers}
        products = [(count, c.hidden) for count in rows] + [(c.hidden, c.q_width)]
        for width in {weight.shape[1] for weight in (layer.feed_forward[6] for layer in like.layers)}:
            if shared_apart_pays(steps.buckets.tokens[-1], c.hidden, width):
                products += [(2 * width, c.hidden), (c.hidden, width)]
        self._thread = threading.Thread(target=_load_library, args=(products, steps.buckets.tokens), daemon=True)
        self._thread.start()
        spent = (len(kernels), noted - begin, time.perf_counter() - noted)
        _log.info("%d kernels foreseen in %.1f s, processes started in %.1f s", *spent)

    def compilation(self) -> Compilation | None:
        """The kernels, perhaps not compiled yet; waits for everything else. None if none could be foreseen."""
        begin = time.perf_counter()
        self._thread.join()
        _log.info("waited %.1f s for the library", time.perf_counter() - begin)
        return self._compilation

    def close(self) -> None:
        """The executor will not be made after all."""
        if self._compilation is not None:
            self._compilation.close()


def _load_library(products: list[tuple[int, int]], tokens: Sequence[int]) -> None:
    """Multiply matrices of weights, (rows, columns) each, by as many tokens as steps have, and throw it away."""
    from triton.runtime.driver import driver

    driver.active.get_current_device()  # compiled by a C compiler the first time
    with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():  # type: ignore[no-untyped-call]
        for rows, columns in products:
            weight = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
            for count in tokens:
                x = weight.new_zeros(count, columns)
                out = torch.mm(x, weight.T)
                out.addmm_(x, weight.T)
        torch.cuda.current_stream().synchronize()
