"""The executor's memory on the device."""

from __future__ import annotations

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
        self.turn = self.staging[1:2]
        """Number of the step's slot: the header's second word."""
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
