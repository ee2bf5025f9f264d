"""How much memory a CPU executor may use, and whether a model's weights fit into it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from longturn.errors import ConfigError
from longturn.models.formats import KEPT_BLOCKS

_GB = 1e9
_STAY_QUANTISED = ("nvfp4", "mxfp8")
"""Experts in these are computed from as they are stored, where they are many; all other weights become fp32."""
_Q8_0_BYTES = 34 / 32
"""Of one packed weight whose format is not kept: blocks of 32 with a scale of two bytes."""


def usable_memory_bytes(root: Path = Path("/")) -> int | None:
    """Installed memory, or the cgroup's limit where that is less; None where the system says neither.

    A page pool beyond it would be promised by the kernel all the same, and the process killed once the pages fill.
    """
    found = [size for size in (_installed(root), _cgroup_limit(root)) if size is not None]
    return min(found, default=None)


def check_weights_fit(
    path: Path, sizes: Iterable[tuple[str, int, int]], *, cache_bytes: int, usable_bytes: int | None, packable: bool
) -> None:
    """Refuse fp32 weights that memory cannot hold, before any is read: the process would be killed while it reads them.

    Args:
        path: of the model, for the message.
        sizes: (format, parameters, stored bytes) of the checkpoint, by format or by tensor.
        cache_bytes: of the page pool.
        usable_bytes: from `usable_memory_bytes`; None refuses nothing.
        packable: the model can be served from packed weights instead.

    Raises:
        ConfigError: it says how much is needed, and what would fit.
    """
    sizes = list(sizes)
    needed = sum(stored if form in _STAY_QUANTISED else 4 * count for form, count, stored in sizes)
    if usable_bytes is None or cache_bytes > usable_bytes:
        return  # a page pool that is larger than memory by itself is told of where it is made
    left = usable_bytes - cache_bytes
    if needed <= left:
        return
    fits = f"{left / 4e9:,.1f}B parameters fit"
    if packable:
        packed = sum(stored if form in KEPT_BLOCKS else _Q8_0_BYTES * count for form, count, stored in sizes)
        if packed <= left:
            fits = f"model.weights 'packed' fits with {packed / _GB:,.1f} GB"
        else:
            fits += f", {left / _Q8_0_BYTES / _GB:,.1f}B with model.weights 'packed'"
    raise ConfigError(
        f"{path} does not fit in memory: {needed / _GB:,.1f} GB of weights, fp32 but for quantised experts, and "
        f"{cache_bytes / _GB:,.1f} GB of cache.memory_bytes, of {usable_bytes / _GB:,.1f} GB here ({fits})"
    )


def _installed(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _cgroup_limit(root: Path) -> int | None:
    """`memory.max` of cgroup v2: bytes, or `max`."""
    try:
        text = (root / "sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
