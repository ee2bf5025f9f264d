"""Vera Rubin's experts, from half of the one kernel table that is public.

The vLLM blog of 2026-10-09 gives one layer's time on two and four ranks, with experts split (TP) and spread (EP).
Constants come from the spread ones, whose two and four ranks tell fixed time from bytes and whose largest batches show
the rate of computing; the split ones are what they are judged by (`longturn.simulate.published`). Balanced routing
reads every expert from 32 tokens on, so no row shows how time grows with few experts: proportionally, here.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from longturn.simulate.calibration import ExpertConstants
from longturn.simulate.fit.experts import ExpertRows
from longturn.simulate.formats import WEIGHT_BYTES
from longturn.simulate.layout import parse_layout
from longturn.simulate.platform import Platform
from longturn.simulate.published_data import Group, groups
from longturn.simulate.shapes import ModelShape, load_shape


def fit_rubin_experts(platform: Platform) -> dict[str, ExpertConstants]:
    """Constants of NVFP4 experts, plain and placed by locality domain."""
    fitted = [group for group in groups("experts") if group.text("use") == "fitted"]
    bandwidth = platform.value("hbm_bandwidth") / 1e9
    found: dict[str, ExpertConstants] = {}
    for column, key in (("plain", "nvfp4"), ("localized", "nvfp4-localized")):
        rows = rubin_rows(platform, fitted, column)
        found[key] = rows.fit(
            bandwidth,
            "published",
            f"vLLM blog 2026-10-09, {column}: EP2 and EP4; TP2 and TP4 are held out",
            "nvfp4",
            1.0,
        )
    return found


def rubin_rows(platform: Platform, chosen: Iterable[Group], column: str) -> ExpertRows:
    """Rows of the published table as the experts' formula takes them.

    Tokens are a rank's own: under EP each rank brings as many, and computes as many choices as it brings.
    """
    shape: ModelShape = load_shape("m3")
    bandwidth, peak = platform.value("hbm_bandwidth") / 1e9, platform.flops("nvfp4") / 1e9
    parts = []
    for group in chosen:
        layout = parse_layout(group.text("layout"))
        choices = np.array(group.numbers("tokens")) * shape.top_experts
        elements = 3.0 * shape.hidden * shape.expert_ffn / layout.expert_tp
        experts = shape.experts / layout.expert_ep
        stream = np.full_like(choices, experts * elements * WEIGHT_BYTES["nvfp4"] / bandwidth)
        parts.append(
            (stream, 2.0 * choices * elements / peak, choices * shape.hidden, np.array(group.numbers(column)) * 1e3)
        )
    stream_ns, compute_ns, activation, ns = (np.concatenate(column_parts) for column_parts in zip(*parts, strict=True))
    return ExpertRows(stream_ns, compute_ns, activation, ns)
