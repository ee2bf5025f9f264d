"""No default plan of the kernels for many tokens asks for more shared memory than a Hopper program can have."""

from __future__ import annotations

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, so it must precede that
pytest.importorskip("triton", reason="triton is not installed")

from longturn.kernels.moe_many import MoeManyPlan
from longturn.kernels.msa_many import MsaManyPlan
from longturn.kernels.msa_plan import MsaShape
from longturn.kernels.pages import PageLayout

MOST_BYTES = 232_448


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_plans_of_experts_fit(element_bytes: int) -> None:
    sizes = []
    for experts, top in ((128, 4), (8, 2), (256, 8), (32, 0), (16, 16)):
        for tokens in [1 << i for i in range(16)] + [3, 520, 5000]:
            plan = MoeManyPlan.default(tokens, experts, top).fitting(element_bytes)
            sizes.append(plan.shared_bytes(element_bytes))
    assert max(sizes) <= MOST_BYTES
    widest = MoeManyPlan.default(8192, 128, 4)
    assert widest.shared_bytes(4) > MOST_BYTES, "the plan for two bytes must not be what four bytes get"


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("heads", [(32, 4), (64, 4), (2, 1), (16, 1), (8, 8), (16, 16)])
def test_plans_of_attention_fit(heads: tuple[int, int], element_bytes: int) -> None:
    shape = MsaShape(heads[0], PageLayout(2, heads[1]), rotary_dim=64, max_blocks=1024)
    plan = MsaManyPlan.default(shape).fitting(element_bytes)
    assert plan.shared_bytes(shape, element_bytes) <= MOST_BYTES
    assert plan.score_tokens * heads[1] >= 8 and plan.piece == MsaManyPlan.default(shape).piece


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("parts", [2, 4])
def test_products_over_parts_of_quantised_words_are_wide_enough(element_bytes: int, parts: int) -> None:
    """A word holds `parts` values, each a factor of its own product, and tensor-core products are 16 columns wide."""
    for experts, top in ((128, 4), (8, 2), (32, 0)):
        for tokens in (1, 40, 512, 8192):
            plan = MoeManyPlan.packed(tokens, experts, top).fitting(element_bytes, parts)
            assert min(plan.in_block, plan.down_block) >= 16 * parts
            assert plan.tile <= 64 or top, "MXFP8 weights of a plain MLP do not fit beside tiles of 128"
