"""Which plan each kernel of MiniMax-M3 runs with: its own choice, changed where the device's table says so."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

from longturn.kernels.moe_few import MoePlan
from longturn.kernels.moe_many import MoeManyPlan
from longturn.kernels.moe_one import MoeOnePlan
from longturn.kernels.msa_many import MsaManyPlan
from longturn.kernels.msa_plan import MsaPlan, MsaShape
from longturn.kernels.packed_weights import WeightFormat, as_packed
from longturn.kernels.pages import PageLayout
from longturn.kernels.plan_table import PlanTable
from longturn.kernels.sampling_table import SamplePlan
from longturn.kernels.small_linear import LinearPlan, largest_power_of_two
from longturn.models.minimax_m3_gpu_weights import GpuWeights, Weight

P = TypeVar("P")

PLANS: dict[str, type] = {
    "projection": LinearPlan,
    "out": LinearPlan,
    "head": LinearPlan,
    "msa": MsaPlan,
    "moe_one": MoeOnePlan,
    "moe_few": MoePlan,
    "msa_many": MsaManyPlan,
    "moe_many": MoeManyPlan,
    "sample": SamplePlan,
}
"""Plan records by the names that a table knows them by."""


@dataclass(frozen=True)
class GpuPlans:
    """Where plans come from."""

    linear: LinearPlan | None = None
    """Of projections, in place of their own choice."""
    head: LinearPlan | None = None
    table: PlanTable = field(default_factory=PlanTable)


class ModelPlans:
    """Plans of one model's kernels by step size."""

    def __init__(self, weights: GpuWeights, layout: PageLayout, plans: GpuPlans | None = None) -> None:
        self._plans = plans or GpuPlans()
        c = weights.config
        self._c, self._layout = c, layout
        routed = next(layer for layer in weights.layers if layer.top)
        self._routed_form = as_packed(routed.feed_forward[3]).format
        experts = f"{c.experts}x{c.top_experts} {c.expert_ffn}x{c.hidden} {_form(routed.feed_forward[3])}"
        attention = f"{c.heads}/{c.kv_heads} {layout.kv_format.value} {layout.index_format.value}"
        self.shapes = {
            "projection": f"{routed.projection.shape[0]}x{c.hidden} {_form(routed.projection)}",
            "out": f"{c.hidden}x{c.q_width} {_form(routed.out)}",
            "head": f"{c.vocab_size}x{c.hidden} {_form(weights.head)}",
            "moe_one": experts,
            "moe_few": experts,
            "moe_many": f"{c.experts}x{c.top_experts} {c.expert_ffn}x{c.hidden}",
            "msa": attention,
            "msa_many": attention,
            "sample": str(c.vocab_size),
        }
        """Of each kernel, as table entries name it."""

    def projection(self, rows: int, max_blocks: int) -> LinearPlan:
        return self._of("projection", rows, self._plans.linear or LinearPlan.before_attention(rows, max_blocks))

    def out(self, rows: int) -> LinearPlan:
        return self._of("out", rows, self._plans.linear or LinearPlan())

    def head(self, rows: int) -> LinearPlan:
        return self._of("head", rows, self._plans.head or head_plan(rows, self._c.hidden))

    def msa(self, rows: int, max_blocks: int) -> MsaPlan:
        plan = self._of("msa", rows, MsaPlan.default(rows, max_blocks, self._layout.kv_format))
        chunks = max(1, min(plan.chunks, max_blocks))
        return replace(plan, chunks=chunks, splits=min(plan.splits, self._c.selection.top))

    def moe_one(self) -> MoeOnePlan:
        return self._of("moe_one", 1, MoeOnePlan.default(self._c.hidden, self._routed_form))

    def moe_few(self, rows: int) -> MoePlan:
        return self._of("moe_few", rows, MoePlan.default(self._routed_form, rows, self._c.hidden))

    def moe_many(self, tokens: int) -> MoeManyPlan | None:
        """None: the launch chooses, by what it is given."""
        default = MoeManyPlan.default(tokens, self._c.experts, self._c.top_experts)
        plan = self._of("moe_many", tokens, default)
        return None if plan is default else plan

    def msa_many(self, tokens: int, shape: MsaShape) -> MsaManyPlan:
        return self._of("msa_many", tokens, MsaManyPlan.default(shape, tokens))

    def sample(self, samples: int) -> SamplePlan:
        return self._of("sample", samples, SamplePlan.default(samples))

    def _of(self, kernel: str, rows: int, default: P) -> P:
        return self._plans.table.apply(kernel, self.shapes[kernel], rows, default)


def head_plan(rows: int, hidden: int) -> LinearPlan:
    """As measured at hidden sizes of 2,048 and 6,144 (docs/performance.md). The head is so large that what counts is
    how many bytes a program has on their way, and not how soon it begins."""
    if rows == 1:
        return LinearPlan(rows=8, block=largest_power_of_two(hidden, 512))
    return LinearPlan(dot_rows=64, dot_block=128, dot_stages=4) if rows <= 32 else LinearPlan()


def _form(weight: Weight) -> str:
    return WeightFormat(as_packed(weight).format).name.lower()
