"""What the GPU executor needs of a model on its device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from longturn.kernels.sampling_table import SamplePlan
from longturn.kernels.step_state import Arrival


class DeviceModel(Protocol):
    """A model and its page pool on one device. All work is enqueued on the current stream; nothing waits.

    Every method may run under graph capture: extents come from device buffers, and the tensors it allocates are
    scratch that the next call may overwrite.
    """

    device: torch.device
    dtype: torch.dtype
    hidden: int
    vocab_size: int
    pages: int
    page_bytes: int
    largest_batch: int
    """Slots of a decode step at most."""
    warm_layers: int
    """First layers that, taken for all of them, launch every kernel there is."""

    @property
    def storage(self) -> Tensor:
        """uint8 [pages, page_bytes]: the page pool's own memory."""
        ...

    def decode(
        self, tokens: Tensor, positions: Tensor, page_table: Tensor, x: Tensor, max_blocks: int,
        layers: int | None = None, arrival: Arrival | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Hidden states x [B, hidden] before the final norm, of one new token a slot; and x after it, for `logits`,
        where the last kernel makes that too.

        tokens, positions int32 [B], position -1 for padding; page_table int32 [B, P]; no slot has more than
        `max_blocks` pages. `layers` computes only so many, for what is thrown away. With `arrival` the first launch
        is `begin_decode`, which finds them all.
        """
        ...

    def many(
        self, tokens: Tensor, positions: Tensor, rows: Tensor, page_table: Tensor, tiles: Tensor, x: Tensor,
        max_blocks: int, layers: int | None = None,
    ) -> None:  # fmt: skip
        """The same for T tokens of any rows: x [T, hidden]; the others as in `kernels.many_tokens.ManyTokens`."""
        ...

    def sample_plan(self, samples: int) -> SamplePlan:
        """How sampling after so many tokens deals out its work."""
        ...

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page of every layer and lane. Not captured."""
        ...

    def logits(self, x: Tensor, normed: Tensor | None = None) -> Tensor:
        """Final norm and head: fp32 [S, vocab_size] of x [S, hidden]; `normed` is what `decode` returned."""
        ...
