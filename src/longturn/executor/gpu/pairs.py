"""A step's (word, value) pairs as they are written into the buffer that goes to the device."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from longturn.executor.gpu.layout import HEADER_WORDS, Part

Int32 = npt.NDArray[np.int32]


class Pairs:
    """Writes pairs behind the header, one after the other."""

    __slots__ = ("_view", "_words", "count")

    def __init__(self, buffer: Int32) -> None:
        """`buffer`: an even number of words, overwritten from its start."""
        self.count = 0
        """Pairs so far."""
        self._view = buffer[HEADER_WORDS:].reshape(-1, 2)
        self._words = buffer.data

    def put(self, at: int, values: Int32) -> None:
        """values[i] goes to word at + i."""
        end = self.count + len(values)
        self._view[self.count : end, 0] = np.arange(at, at + len(values), dtype=np.int32)
        self._view[self.count : end, 1] = values
        self.count = end

    def put_template(self, template: Template, columns: Iterable[array[int]]) -> None:
        """Pairs of a template, with other first values in its first parts.

        Through the buffer itself: for the few words of a decode step each operation on arrays of NumPy takes as long
        as all of this.
        """
        words, begin = self._words, HEADER_WORDS + 2 * self.count
        words[begin : begin + len(template.words)] = template.words
        self.count += len(template.words) // 2
        begin += 1
        for values in columns:
            words[begin : begin + 2 * len(values) : 2] = memoryview(values)
            begin += 2 * template.size

    def finish(self) -> int:
        """Write the header; the words in use."""
        self._words[0] = self.count
        return HEADER_WORDS + 2 * self.count


class Template:
    """Pairs made before: the first words of some parts of the state, and a value for each."""

    __slots__ = ("size", "words")

    def __init__(self, parts: Iterable[tuple[Part, Iterable[int]]], size: int) -> None:
        """`parts` with `size` values each."""
        self.size = size
        pairs = [pair for part, values in parts for pair in zip(range(part.at, part.at + size), values, strict=True)]
        self.words = memoryview(array("i", [word for pair in pairs for word in pair]))
