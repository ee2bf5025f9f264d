"""Whether there is a GPU that the kernels run on, in one clear line if there is not."""

from __future__ import annotations

import importlib.util

from longturn.errors import ConfigError

_LEAST_CAPABILITY = (9, 0)
"""Hopper: dependent launches and the shared memory that tiles are sized for."""


def why_no_device() -> str | None:
    """What is missing here to run on a GPU; None if nothing. Starts no CUDA context unless a driver is there."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA (install a CUDA build of torch)"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (install longturn[gpu])"
    if not torch.cuda.is_available():
        return _why_unavailable()
    capability = torch.cuda.get_device_capability()
    if capability < _LEAST_CAPABILITY:
        name, have, need = torch.cuda.get_device_name(), _dotted(capability), _dotted(_LEAST_CAPABILITY)
        return f"{name} has compute capability {have}, and {need} is needed (H100, H200 or later)"
    return None


def check_device() -> None:
    """Raises ConfigError with what `why_no_device` says."""
    if (reason := why_no_device()) is not None:
        raise ConfigError(f"executor.device 'cuda' is not possible: {reason}; executor.device 'cpu' works without")


def _why_unavailable() -> str:
    """CUDA's own words tell a missing driver from one that is too old."""
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "driver" in first and "old" in first:
            return f"the NVIDIA driver is too old for torch's CUDA {torch.version.cuda} ({first})"
        return f"no GPU can be used here ({first})"
    return "no GPU is visible"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
