"""One view of published checkpoints: tensors under their Hugging Face names, read one at a time."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from longturn.errors import ModelError
from longturn.source import ModelSource

if TYPE_CHECKING:  # raw blocks are read without torch
    from torch import Tensor


class Checkpoint(Protocol):
    """A checkpoint's tensors. Whatever permutation a format applies to rows has been undone."""

    @property
    def path(self) -> Path:
        """What error messages name."""
        ...

    def names(self) -> Set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ModelError if there is no such tensor."""
        ...

    def load(self, name: str) -> Tensor:
        """The tensor in the checkpoint's own floating dtype; quantised ones are dequantised to fp32.

        It may be a view of a read-only file: copy before writing to it.
        """
        ...


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Open the files of a source.

    Raises:
        ModelError: a file is damaged.
    """
    if source.kind == "gguf":
        from longturn.models.checkpoint.gguf import GGUFCheckpoint

        return GGUFCheckpoint(source)
    if source.architecture.startswith("MiniMaxM3"):
        from longturn.models.checkpoint.published import PublishedCheckpoint

        return PublishedCheckpoint.of(source)
    from longturn.models.checkpoint.hf import SafetensorsCheckpoint

    return SafetensorsCheckpoint(source)


class CheckedReader:
    """Hands out tensors with their shapes checked, and at the end tells which ones nobody asked for.

    A tensor that a family does not know, such as the bias of a variant, would otherwise be dropped in silence and the
    model would answer nonsense.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._unread = set(checkpoint.names())

    def load(self, name: str, *shape: int) -> Tensor:
        """Tensor `name`, which must have this shape.

        Raises:
            ModelError: it is missing or has another shape.
        """
        self.check(name, *shape)
        return self.checkpoint.load(name)

    def check(self, name: str, *shape: int) -> None:
        """Mark `name` as read after checking its shape, for callers that read it in another form."""
        if name not in self.checkpoint.names():
            raise ModelError(f"{self.checkpoint.path}: tensor {name} is missing")
        found = self.checkpoint.shape(name)
        if found != shape:
            raise ModelError(f"{self.checkpoint.path}: tensor {name} has shape {list(found)}, not {list(shape)}")
        self._unread.discard(name)

    def ignore(self, name: str) -> None:
        """`name` may be there and is not needed."""
        self._unread.discard(name)

    def finish(self) -> None:
        """Raises ModelError if the checkpoint has tensors that were neither read nor ignored."""
        # Frequencies are computed from the configuration; old checkpoints store them all the same.
        left = sorted(name for name in self._unread if not name.endswith("rotary_emb.inv_freq"))
        if left:
            raise ModelError(
                f"{self.checkpoint.path}: {len(left)} tensors have no place in this architecture, first {left[0]}"
            )
