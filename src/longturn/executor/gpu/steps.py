"""The kernels that steps launch, over the executor's buffers on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from longturn.config import PAGE_TOKENS
from longturn.executor.gpu.buckets import Buckets, Piece, StepKind, StepShape, pieces_of
from longturn.executor.gpu.compile import Kernel, noting_kernels
from longturn.executor.gpu.layout import StateLayout
from longturn.executor.gpu.masks import Masks
from longturn.executor.gpu.model import DeviceModel
from longturn.executor.gpu.packer import many_tiles
from longturn.executor.gpu.queue import SLOTS
from longturn.executor.gpu.sampling import SampleResults
from longturn.executor.gpu.state import DeviceState
from longturn.kernels.sampling import sample_rows
from longturn.kernels.sampling_table import SamplePlan, SampleScratch
from longturn.kernels.step_state import Arrival, pick_rows, scatter, token_ids

_FIRST_ROWS = 8


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """What an executor is built for."""

    rows: int
    step_tokens: int
    """Most tokens of one step."""
    max_context_tokens: int
    graphs: bool = True
    sample_plan: SamplePlan | None = None
    """In place of the model's."""
    host_pages: int = 0
    """Pages that host memory is to hold beside the pool."""


class DeviceSteps:
    """Steps of one model by shape, and the buffers that they share. Without a GPU (`meta`) they can only be noted."""

    def __init__(
        self, model: DeviceModel, limits: GpuLimits, *, masked: bool, stream: torch.cuda.Stream | None = None
    ) -> None:
        """
        Args:
            model: with its page pool.
            limits: what to make room for.
            masked: whether requests may bring grammars.
            stream: the one that steps run on.
        """
        self.model = model
        self.stream = stream
        # A step may hold every row's decode beside the prompts, and a row of padding costs nothing.
        max_tokens = max(limits.step_tokens, limits.rows)
        self.layout = StateLayout.of(limits.rows, limits.max_context_tokens, max_tokens)
        self.buckets = Buckets.of(limits.rows, max_tokens, limits.max_context_tokens, model.largest_batch)
        self.sample_sizes = Buckets.of(limits.rows, max_tokens, limits.max_context_tokens, limits.rows).batches
        self._masked = masked
        self._sample_plan = limits.sample_plan
        self._pdl = model.device.type != "cpu"  # `meta` stands for a GPU
        with self.on_stream():
            self.state = DeviceState(self.layout, model.hidden, model.vocab_size, model.dtype, model.device)
            self.results = SampleResults(limits.rows, SLOTS, self.state.turn, model.device)
            self.masks = Masks(limits.rows, model.vocab_size, model.device)

    def on_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def shapes(self) -> list[StepShape]:
        """Every shape that a step can have, the largest first."""
        buckets = self.buckets
        shapes = [StepShape(StepKind.MANY, t, b) for t in buckets.tokens for b in buckets.blocks]
        shapes += [StepShape(StepKind.DECODE, n, b) for n in buckets.batches for b in buckets.blocks]
        return sorted(shapes, key=lambda s: s.tokens * s.blocks, reverse=True)

    def first_and_later(self) -> tuple[list[Piece], list[Piece]]:
        """All pieces in two parts: those that a server is to have before it serves, and others.

        They are those of decode steps of few rows, after the largest of all, in whose memory the others find their
        scratch. The others are in the order in which to make them; light ones, for which another can stand in, last.
        """
        first, later, light = [], [], []
        largest, *rest = self.shapes()
        for piece in (*pieces_of(largest), *(piece for shape in rest for piece in pieces_of(shape))):
            kind, rows = piece.shape.kind, piece.shape.tokens
            if piece.light:
                light.append(piece)
            elif piece.shape == largest or (kind is StepKind.DECODE and rows <= _FIRST_ROWS):
                first.append(piece)
            else:
                later.append(piece)
        later.sort(key=lambda piece: piece.shape.kind is StepKind.MANY)
        return first, later + light

    def kernels(
        self, launches: Iterable[Callable[[], None]], capability: tuple[int, int] | None = None
    ) -> list[Kernel]:
        """What some of `body` and `tail` launch; `capability` as in `noting_kernels`."""
        with noting_kernels(capability) as noted, torch.inference_mode():
            for launch in launches:
                launch()
        return noted

    def all_kernels(self, capability: tuple[int, int]) -> list[Kernel]:
        """What all steps launch, in the order in which a server wants them."""
        first, later = self.first_and_later()
        launches = [self.tail(*tail) for tail in self.tails()]  # these compile longest
        launches += [self.body(piece, self.model.warm_layers) for piece in (*first, *later)]
        return self.kernels(launches, capability)

    # --- a step -----------------------------------------------------------------------------------------------------

    def scatter(self) -> None:
        """Apply a step's differences alone."""
        scatter(self.state.staging, self.state.words)

    def body(self, piece: Piece, layers: int | None = None) -> Callable[[], None]:
        """A piece's launches. `layers`: only the first, for what is thrown away."""
        if piece.shape.kind is StepKind.DECODE:
            return lambda: self._decode(piece, layers)
        return lambda: self._many(piece.shape, layers)

    def tails(self) -> list[tuple[int, bool]]:
        """Every `tail`'s arguments, the largest first."""
        return [(size, light) for light in (False, True) for size in reversed(self.sample_sizes)]

    def tail(self, size: int, light: bool) -> Callable[[], None]:
        """Sampling after a step of many tokens, of up to `size` of them; `light` as in `Piece`."""
        return lambda: self._pick_and_sample(size, light)

    def _decode(self, piece: Piece, layers: int | None) -> None:
        """A whole decode step, sampling included."""
        state, n, blocks = self.state, piece.shape.tokens, piece.shape.blocks
        positions, tokens, table = state.position[:n], state.tokens[:n], state.batch_table[:n]
        arrival = Arrival(
            state.staging, state.words, state.token[:n], state.token_row[:n], state.last_token, state.page_table,
            blocks, PAGE_TOKENS,
        )  # fmt: skip
        x = state.hidden[:n]
        normed = self.model.decode(tokens, positions, table, x, blocks, layers, arrival)
        self._sample(x, normed, piece.light)

    def _many(self, shape: StepShape, layers: int | None) -> None:
        state, n = self.state, shape.tokens
        scatter(state.staging, state.words)
        positions, rows, tokens = state.position[:n], state.token_row[:n], state.tokens[:n]
        token_ids(state.token[:n], rows, positions, state.last_token, tokens, pdl=self._pdl)
        tiles = state.tiles[: many_tiles(n, state.layout)]
        self.model.many(tokens, positions, rows, state.page_table, tiles, state.hidden[:n], shape.blocks, layers)

    def _pick_and_sample(self, size: int, light: bool) -> None:
        picked = self.state.picked[:size]
        pick_rows(self.state.hidden, self.state.sample_index[:size], picked)
        self._sample(picked, None, light)

    def _sample(self, x: torch.Tensor, normed: torch.Tensor | None, light: bool) -> None:
        """Sample after hidden states x [S, hidden] into `results`, and into the state for the next step; `normed` as in
        `DeviceModel.logits`."""
        state, size = self.state, x.shape[0]
        logits = self.model.logits(x, normed)
        masks = self.masks.words[:size] if self._masked and not light else None
        default = SamplePlan.default(size, full=False) if light else self.model.sample_plan(size)
        plan = self._sample_plan or default
        scratch = SampleScratch.allocate(size, logits.shape[1], plan, x.device)
        sample_rows(
            logits, state.sample_row[:size], state.sample_position[:size], state.sampling, scratch,
            self.results.first(size), plan=plan, last_tokens=state.last_token,
            bitmask=masks, full=not light, pdl=self._pdl,
        )  # fmt: skip
