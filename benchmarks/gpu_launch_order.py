"""What a kernel of a chain of dependent launches may read before its wait: a chain write -> pass -> read, timed to
fail.

`write` stores a new value after a delay, `pass` waits and releases, `read` loads before its wait. If the release of
`pass` implied that `write` is complete, `read` would always see the new value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from longturn.kernels.dependent import FRESH, launch_options, wait_then_release


@triton.jit
def _write(values, out, rounds, PDL: tl.constexpr):
    i = tl.program_id(0) * 8 + tl.arange(0, 8)
    near = tl.load(out + (tl.program_id(0) // 16) * 128 + tl.arange(0, 128))  # leaves neighbours' old values in L1
    wait_then_release(PDL)
    value = tl.load(values).to(tl.float32)
    x = value + 0.0 * i
    for _ in range(rounds):
        x = x * 1.0000001 - x * 0.0000001
    near += tl.load(out + (tl.program_id(0) // 16) * 128 + tl.arange(0, 128))
    tl.store(out + i, tl.where((x == x) & (tl.sum(near, axis=0) > -1.0), value, x))


@triton.jit
def _pass(source, sink, PDL: tl.constexpr, EARLY: tl.constexpr):
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    else:
        wait_then_release(PDL)
    tl.store(sink + i, tl.load(source + tl.arange(0, 128), cache_modifier=FRESH))


@triton.jit
def _read(source, before, after, plain, PDL: tl.constexpr):
    i = tl.program_id(0) * 8 + tl.arange(0, 8)
    early = tl.load(source + i, cache_modifier=FRESH)
    wait_then_release(PDL)
    tl.store(before + i, early)
    tl.store(plain + i, tl.load(source + i))
    tl.store(after + i, tl.load(source + i, cache_modifier=FRESH))


def count_stale(programs: int, middle: int, early: bool) -> list[int]:
    """Of 100 chains, those in which `pass`, and `read` before its wait, after it, and after it by a cached load, saw an
    old value."""
    device = "cuda"
    source, sink = torch.zeros(programs * 8, device=device), torch.zeros(middle * 128, device=device)
    before, after, plain = torch.zeros_like(source), torch.zeros_like(source), torch.zeros_like(source)
    value, spare = torch.zeros(1, device=device), torch.zeros(512, device=device)
    graph = torch.cuda.CUDAGraph()

    def chain() -> None:
        _pass[(4,)](source, spare, PDL=False, EARLY=False)
        _write[(programs,)](value, source, 2000, PDL=True, **launch_options(True))
        _pass[(middle,)](source, sink, PDL=True, EARLY=early, **launch_options(True))
        _read[(programs,)](source, before, after, plain, PDL=True, **launch_options(True))

    chain()
    with torch.cuda.graph(graph):
        chain()
    wrong = [0, 0, 0, 0]
    for turn in range(1, 101):
        value.fill_(float(turn))
        graph.replay()
        for n, seen in enumerate((sink, before, after, plain)):
            wrong[n] += bool((seen != turn).any().item())
    return wrong


def launch_order() -> list[str]:
    """Counts of stale reads for several sizes, where `pass` releases after its wait and where it releases first."""
    lines = []
    for early in (False, True):
        for programs, middle in ((512, 4), (512, 160), (64, 32), (2112, 32)):
            wrong = count_stale(programs, middle, early)
            lines.append(
                f"launch order: write {programs} programs, pass {middle} releases "
                f"{'first' if early else 'after its wait'}: stale in pass {wrong[0]}, in read before its wait "
                f"{wrong[1]}, after it {wrong[2]}, cached load {wrong[3]} of 100"
            )
            print(lines[-1], flush=True)
    return lines
