"""Matrix products with weights stored as [out, in], the way checkpoints have them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times weight [out, in] transposed, plus bias [out]; all of one dtype. Returns [..., out]."""
    return F.linear(x, weight, bias)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [..., 2 * width], gate first. Returns [..., width] in the dtype of the input."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def embed(token_ids: Tensor, table: Tensor) -> Tensor:
    """Rows of table [vocab, hidden] for token_ids [T] (int32 or int64). Returns [T, hidden]."""
    return table.index_select(0, token_ids.to(torch.int64))
