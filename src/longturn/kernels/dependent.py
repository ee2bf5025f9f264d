"""Programmatic dependent launch: how one kernel of a step starts under the tail of the one before it.

Every decode kernel has the same shape: load what the kernels just before it do not write (weights, page tables),
`wait_then_release`, then read the predecessor's output.

The release comes after the wait on purpose. If B lets its successor start only after its own wait on A, then a running
block of C knows that A is complete, and C may read A's output, and everything older, ahead of its own wait. `attend`
reads the projection so, `down` the router's logits and `experts_down` the choices.
`benchmarks/gpu_kernels.py order` looks for a counterexample: none in 400 chains, and a stale read in every one of 400
where B released first.

A kernel whose successor reads nothing ahead but weights may release first (`release_then_wait`): `attend`, `merge`,
`combine` and, where it is asked to, `down`, which all come before a projection. Its weights are then on their way to
shared memory (linear_ahead.py) while these kernels still wait for their predecessors.

Reads of anything that a kernel of the step writes bypass L1 (`cache_modifier=FRESH`): the buffers are the same in
every layer, and a multiprocessor that runs the next kernel's blocks beside this one's could hold a line of the value
before.

A kernel in the middle of a chain must never skip its wait: its successor's wait covers this kernel only.
"""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

FRESH = tl.constexpr(".cg")
"""Cache modifier of every read of what an earlier kernel of the step wrote."""


@triton.jit
def wait_then_release(PDL: tl.constexpr):
    """Wait until the preceding grid is complete and its stores are visible, then let the next grid start launching."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def release_then_wait(PDL: tl.constexpr):
    """Let the next grid start launching once all programs of this one run, then wait as above. Only for kernels whose
    successor reads nothing before its own wait that any kernel of the step writes."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def launch_options(pdl: bool) -> dict[str, Any]:
    """Keyword arguments of a kernel launch; the interpreter and other vendors refuse `launch_pdl`, so it is absent
    when off."""
    return {"launch_pdl": True} if pdl else {}
