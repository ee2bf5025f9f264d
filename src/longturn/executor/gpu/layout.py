"""Where everything lies in the executor's one int32 allocation on the device, and how long each part is.

The host addresses words of it by number: a step's differences are (word, value) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

from longturn.config import PAGE_TOKENS
from longturn.kernels.many_tokens import TILE_TOKENS
from longturn.kernels.sampling_table import MAX_BIASES, MAX_STOPS, ROW_WORDS

HEADER_WORDS = 2
"""Words before a step's pairs, as `kernels.step_state` reads them: the number of pairs, and that of the step's slot
(`queue.Slot`), which packing leaves alone."""
_ALIGN_WORDS = 32
"""Every part starts on a 128-byte boundary: Triton compiles anew for pointers that are not 16-byte aligned."""


@dataclass(frozen=True, slots=True)
class Part:
    """Words `at .. at + rows * width - 1`: `rows` rows of `width` words."""

    at: int
    rows: int
    width: int

    @property
    def words(self) -> int:
        return self.rows * self.width

    def row(self, index: int) -> int:
        """First word of a row."""
        return self.at + index * self.width


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Parts of the state. Of each row: what it keeps between steps. Of a step: its inputs, padding included."""

    rows: int
    max_tokens: int
    """Most tokens of one step."""
    max_samples: int
    """Most rows sampled in one step."""
    last_token: Part
    """[rows]: the token that the row sampled last."""
    page_table: Part
    """[rows, pages of the longest context]."""
    sampling: Part
    """[rows, ROW_WORDS]: how each row samples; this and the next three are those of a `SamplingTable`."""
    stop_ids: Part
    bias_ids: Part
    bias_values: Part
    token: Part
    """[max_tokens]: token id, or -1 for the last one that its row sampled."""
    position: Part
    """[max_tokens]: position in the sequence, -1 for padding."""
    token_row: Part
    """[max_tokens]: executor row, 0 for padding."""
    tiles: Part
    """[tiles, 2]: first token and count of each query tile."""
    sample_index: Part
    """[max_samples]: index of the token after which to sample."""
    sample_row: Part
    """[max_samples]: executor row, -1 for padding."""
    sample_position: Part
    """[max_samples]: position of the token to be sampled, -1 for padding."""
    words: int
    """All of it."""

    @staticmethod
    def of(rows: int, max_context_tokens: int, max_tokens: int) -> StateLayout:
        """Lay out the state of an executor of `rows` rows whose steps have up to `max_tokens` tokens."""
        pages = _up(-(-max_context_tokens // PAGE_TOKENS), 16)
        tiles = -(-max_tokens // TILE_TOKENS) + rows
        at = 0

        def part(count: int, width: int) -> Part:
            nonlocal at
            made = Part(at, count, width)
            at = _up(at + made.words, _ALIGN_WORDS)
            return made

        return StateLayout(
            rows=rows,
            max_tokens=max_tokens,
            max_samples=rows,
            last_token=part(rows, 1),
            page_table=part(rows, pages),
            sampling=part(rows, ROW_WORDS),
            stop_ids=part(rows, MAX_STOPS),
            bias_ids=part(rows, MAX_BIASES),
            bias_values=part(rows, MAX_BIASES),
            token=part(max_tokens, 1),
            position=part(max_tokens, 1),
            token_row=part(max_tokens, 1),
            tiles=part(tiles, 2),
            sample_index=part(rows, 1),
            sample_row=part(rows, 1),
            sample_position=part(rows, 1),
            words=at,  # arguments are worked out in order
        )

    @property
    def max_pairs(self) -> int:
        """Most pairs of one step: every row new, every input written."""
        inputs = self.token.words + self.position.words + self.token_row.words + self.tiles.words
        sampling = self.sampling.words + self.stop_ids.words + self.bias_ids.words + self.bias_values.words
        return inputs + 3 * self.max_samples + self.page_table.words + sampling


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
