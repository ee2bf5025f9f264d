"""Layers of steps with chunks that were timed kernel by kernel, predicted: those that constants were fitted to, and
those that were left out."""

from __future__ import annotations

from longturn.simulate.cost.model import StepCost
from longturn.simulate.cost.options import CostOptions
from longturn.simulate.fit.layers import layers_of, predicted_ns
from longturn.simulate.formats import formats_named
from longturn.simulate.platform import load_platform
from longturn.simulate.published import Comparison
from longturn.simulate.published_data import OWN_RUNS, Group, groups


def compare_layers() -> tuple[Comparison, ...]:
    """Every measured layer as a whole, in the file's order."""
    return tuple(one for group in groups("layer", path=OWN_RUNS) for one in _compared(group))


def _compared(group: Group) -> list[Comparison]:
    platform, formats = load_platform(group.text("platform")), formats_named(group.text("formats"))
    options = CostOptions(family=group.text("family"), routing=group.routing)
    found = []
    for layer in layers_of(group):
        if "layer" not in layer.ns:
            continue
        cost = StepCost(platform, layer.shape, layer.layout, formats, options)
        parts = cost.breakdown(layer.step)
        (chunk,) = layer.step.chunks
        beside = f"{layer.step.rows} rows + " if layer.step.rows else ""
        found.append(
            Comparison(
                group.name,
                group.text("platform"),
                "layer",
                f"{beside}{chunk[1]} after {chunk[0]}",
                predicted_ns(cost, layer.step)["layer"] / 1e3,
                layer.ns["layer"] / 1e3,
                "us",
                parts.band_ns / parts.device_ns,
                group.judged,
                group.values.get("use") == "fitted",
            )
        )
    return found
