"""Grammars on the GPU: the bit masks of rows whose output must follow one.

A mask depends on the row's last token, so a step with such a row is launched only when the step before it has been
read: while a grammar runs, the host's planning no longer hides behind the device. Steps without one are not touched;
their masks allow everything.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from longturn.engine.records import RowResult, StepResult
from longturn.executor.gpu.sampling import RowSampling
from longturn.executor.grammar import GrammarError

_ALL = -1
"""A mask word that allows its 32 tokens."""


class _Handle(Protocol):
    def wait(self) -> None: ...

    def result(self) -> StepResult: ...


class _Unread(NamedTuple):
    """Where a row's newest token is found."""

    handle: _Handle
    sample: int


class Masks:
    """One mask a sample on the device, and how far each row's grammar has been led."""

    def __init__(self, samples: int, vocab_size: int, device: torch.device) -> None:
        words = -(-vocab_size // 32)
        self.words = torch.full((samples, words), _ALL, dtype=torch.int32, device=device)
        """int32 [samples, ceil(vocab / 32)], what `sample_rows` reads."""
        pinned = device.type == "cuda"
        self._host = torch.full((samples, words), _ALL, dtype=torch.int32, pin_memory=pinned)
        self._set: set[int] = set()
        """Samples whose mask on the device forbids something."""
        self._unread: dict[int, _Unread] = {}
        self._last: _Handle | None = None
        """The last step with a mask: its copies read the pinned buffer."""

    @property
    def bound(self) -> bool:
        """Whether the last step left a mask that forbids something."""
        return bool(self._set)

    def forget(self, row: int) -> None:
        """The row is free, or given to another request."""
        self._unread.pop(row, None)

    def wanted(self, samples: list[tuple[int, RowSampling]]) -> dict[int, npt.NDArray[np.int32] | str]:
        """Masks of this step's samples, by their number; a text where the row's grammar cannot be followed.

        Waits for the steps that sampled the rows' last tokens.
        """
        found: dict[int, npt.NDArray[np.int32] | str] = {}
        for sample, (row, sampling) in enumerate(samples):
            grammar = sampling.grammar
            if grammar is None:
                continue
            unread = self._unread.pop(row, None)
            if unread is not None:
                for token in unread.handle.result().rows[unread.sample].token_ids:
                    grammar.advance(token)
            try:
                found[sample] = grammar.mask().copy()
            except GrammarError as error:
                found[sample] = str(error)
        return found

    def upload(self, masks: dict[int, npt.NDArray[np.int32] | str]) -> None:
        """Enqueue what changes on the device."""
        if masks and self._last is not None:
            self._last.wait()
        for sample in sorted(self._set - masks.keys()):
            self.words[sample].fill_(_ALL)
        self._set = set()
        for sample, mask in masks.items():
            if isinstance(mask, str):
                self.words[sample].fill_(_ALL)
                continue
            self._host[sample].numpy()[:] = mask
            self.words[sample].copy_(self._host[sample], non_blocking=True)
            self._set.add(sample)

    def launched(self, samples: list[tuple[int, RowSampling]], handle: _Handle) -> None:
        """A step that samples these rows, some with a mask, is on its way."""
        self._last = handle
        for sample, (row, sampling) in enumerate(samples):
            if sampling.grammar is not None:
                self._unread[row] = _Unread(handle, sample)


def with_errors(results: tuple[RowResult, ...], errors: dict[int, str]) -> tuple[RowResult, ...]:
    """The results, but for samples whose grammar could not be followed."""
    if not errors:
        return results
    return tuple(
        RowResult(result.row, (), error=errors[sample]) if sample in errors else result
        for sample, result in enumerate(results)
    )
