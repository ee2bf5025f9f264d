"""The executor's memory on the device, and the pinned buffers that plans go out and results come back through."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longturn.executor.gpu.layout import HEADER_WORDS, Part, StateLayout
from longturn.kernels.sampling_table import PENALTY_SLOT, SamplingTable


class DeviceState:
    """One int32 allocation with views, and the buffers of a step that graphs address by pointer."""

    def __init__(
        self, layout: StateLayout, hidden: int, vocab_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layout = layout
        self.words = torch.zeros(layout.words, dtype=torch.int32, device=device)
        self.staging = torch.zeros(HEADER_WORDS + 2 * layout.max_pairs, dtype=torch.int32, device=device)
        """Where a step's pairs arrive."""
        self.last_token = self.view(layout.last_token).view(-1)
        self.page_table = self.view(layout.page_table)
        self.token = self.view(layout.token).view(-1)
        self.position = self.view(layout.position).view(-1)
        self.token_row = self.view(layout.token_row).view(-1)
        self.tiles = self.view(layout.tiles)
        self.sample_index = self.view(layout.sample_index).view(-1)
        self.sample_row = self.view(layout.sample_row).view(-1)
        self.sample_position = self.view(layout.sample_position).view(-1)
        penalties = torch.zeros(layout.rows, vocab_size, dtype=torch.int32, device=device)
        self.sampling = SamplingTable(
            self.view(layout.sampling),
            self.view(layout.stop_ids),
            self.view(layout.bias_ids),
            self.view(layout.bias_values).view(torch.float32),
            penalties,
        )
        self.sampling.params[:, PENALTY_SLOT] = -1
        self.tokens = torch.zeros(layout.max_tokens, dtype=torch.int32, device=device)
        """Token ids of the step, resolved."""
        self.batch_table = torch.zeros(layout.rows, layout.page_table.width, dtype=torch.int32, device=device)
        """Page tables of a decode step's slots."""
        self.hidden = torch.zeros(layout.max_tokens, hidden, dtype=dtype, device=device)
        self.picked = torch.zeros(layout.max_samples, hidden, dtype=dtype, device=device)
        """Hidden states that are sampled after."""
        self.clear_inputs()

    def clear_inputs(self) -> None:
        """Make every input of a step padding, and its differences none: such a step changes nothing. Until the next
        step is written, that is."""
        self.staging[:HEADER_WORDS].zero_()
        self.tiles.zero_()
        for part in (self.position, self.sample_row, self.sample_position):
            part.fill_(-1)

    def view(self, part: Part) -> Tensor:
        """[rows, width] words of a part."""
        return self.words[part.at : part.at + part.words].view(part.rows, part.width)


@dataclass(slots=True)
class Slot:
    """Host memory of one step in flight, and the events around it (None on a CPU)."""

    pairs: Tensor
    """Pinned int32: what the step changes."""
    pairs_array: npt.NDArray[np.int32]
    """The same memory."""
    results: Tensor
    """Pinned int32: what came back."""
    results_array: npt.NDArray[np.int32]
    begin: torch.cuda.Event | None
    end: torch.cuda.Event | None
    in_flight: bool = False


class SlotRing:
    """Slots in turn. One is taken again only when its step is over, since the copy engine reads and writes it."""

    def __init__(self, count: int, layout: StateLayout, result_words: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._slots = []
        for _ in range(count):
            pairs = torch.zeros(HEADER_WORDS + 2 * layout.max_pairs, dtype=torch.int32, pin_memory=pinned)
            results = torch.zeros(result_words, dtype=torch.int32, pin_memory=pinned)
            self._slots.append(Slot(pairs, pairs.numpy(), results, results.numpy(), _event(pinned), _event(pinned)))
        self._next = 0

    def take(self) -> Slot:
        """The next slot, after waiting for the step that used it last."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.in_flight and slot.end is not None:
            slot.end.synchronize()
        slot.in_flight = False
        return slot


def _event(wanted: bool) -> torch.cuda.Event | None:
    return torch.cuda.Event(enable_timing=True) if wanted else None  # type: ignore[no-untyped-call]
