"""The host tier's copies on a GPU: first that no order is lost, then how fast they are and what they cost a step.

    PYTHONPATH=src python3 benchmarks/gpu_offload.py [check] [times] [--page-mb 17.7] [--host-gb 8]

Without a GPU `check` runs on the CPU, where copies are made at once: it then only finds ordinary mistakes.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

import torch
from torch import Tensor

import gpu_required  # noqa: F401  (ends here without a GPU)
from longturn.config import PAGE_TOKENS
from longturn.engine.records import NewRow, RowWork, SamplingParams, StepPlan
from longturn.executor.gpu.offload import GpuOffload

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def plan_of(
    step: int,
    written: list[int],
    saves: list[tuple[int, int]],
    loads: list[tuple[int, int]],
    copies: list[tuple[int, int]],
) -> StepPlan:
    """A plan whose one row writes `written`."""
    work: tuple[RowWork, ...] = ()
    rows: tuple[NewRow, ...] = ()
    if written:
        work = (RowWork(0, 0, len(written) * PAGE_TOKENS, False),)
        rows = (NewRow(0, "r", b"", 0, tuple(written), SamplingParams(1)),)
    return StepPlan(step, work, rows, (), (0,), tuple(copies), tuple(saves), tuple(loads))


def check(rounds: int, seed: int, page_bytes: int) -> int:
    """Random plans on real streams against plain lists; the number of pages and slots that differ."""
    rng = random.Random(seed)
    pages, slots = 48, 24
    stream = torch.cuda.Stream() if CUDA else None
    pool = torch.arange(pages, device=DEVICE).remainder(251).to(torch.uint8)[:, None].repeat(1, page_bytes)
    if CUDA:
        torch.cuda.synchronize()
    offload = GpuOffload(pool, slots, stream)
    true_pool, true_host = [page % 251 for page in range(pages)], [-1] * slots
    loading: dict[int, int] = {}
    unread: list[tuple[StepPlan, set[int], torch.cuda.Event | None]] = []
    wrong = 0

    def read() -> None:
        nonlocal wrong
        plan, _, event = unread.pop(0)
        if event is not None:
            event.synchronize()
        report = offload.ended(plan)
        wrong += len(report.lost_pages) + len(report.lost_slots)
        for page in report.loaded_pages:
            wrong += not holds(pool[page], loading.pop(page))

    for step in range(1, rounds + 1):
        busy = set(loading).union(*(touched for _, touched, _ in unread))
        free = [page for page in range(1, pages) if page not in busy]
        rng.shuffle(free)
        sources = [slot for slot in range(slots) if true_host[slot] >= 0 and rng.random() < 0.2]
        targets = [slot for slot in range(slots) if slot not in sources and rng.random() < 0.2]
        saves = list(zip(free, targets, strict=False))
        rng.shuffle(free)
        loads = [(slot, free.pop()) for slot in sources if free]
        copies = [(rng.choice(free), free.pop())] if len(free) > 4 else []
        written = [free.pop() for _ in range(4) if free]
        plan = plan_of(step, written, saves, loads, copies)
        offload.begin(plan)
        event = None
        with torch.cuda.stream(stream):
            for source, target in copies:
                pool[target].copy_(pool[source])
            offload.copied(plan)
            for page in written:
                pool[page].fill_(step % 251)
            if stream is not None:
                torch.cuda._sleep(rng.choice([0, 0, 200_000, 2_000_000]))
                event = torch.cuda.Event()
                event.record(stream)
        offload.end()
        for page, slot in saves:
            true_host[slot] = true_pool[page]
        for source, target in copies:
            true_pool[target] = true_pool[source]
        for slot, page in loads:
            loading[page] = true_pool[page] = true_host[slot]
        for page in written:
            true_pool[page] = step % 251
        unread.append((plan, {*written, *(page for pair in copies for page in pair)}, event))
        while len(unread) > 1:
            read()
    while unread:
        read()
    while loading:
        unread.append((plan_of(0, [], [], [], []), set(), None))
        read()
    if CUDA:
        torch.cuda.synchronize()
    wrong += sum(not holds(pool[page], true_pool[page]) for page in range(pages))
    memory = [offload._memory[slot] for slot in range(slots)]
    wrong += sum(not holds(memory[slot], true_host[slot]) for slot in range(slots) if true_host[slot] >= 0)
    offload.close()
    return wrong


def holds(page: Tensor, value: int) -> bool:
    return bool((page == value).all())


def times(page_bytes: int, host_bytes: int) -> None:
    """Prints bandwidths, the host's time, and a decode-like step with and without copies beside it."""
    stream = torch.cuda.Stream()
    slots = host_bytes // page_bytes
    pages = slots + 64
    pool = torch.zeros(pages, page_bytes, dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    offload = GpuOffload(pool, slots, stream)
    spent = time.perf_counter() - begin
    total = slots * page_bytes
    print(f"pin      {total / 1e9:.1f} GB in {spent:.2f} s ({total / 1e9 / spent:.1f} GB/s)", flush=True)
    for name in ("save", "load", "save"):
        pairs = [(i, i) for i in range(slots)]
        plan = plan_of(1, [], pairs if name == "save" else [], pairs if name == "load" else [], [])
        begin = time.perf_counter()
        offload.begin(plan)
        offload.copied(plan)
        offload.end()
        given = time.perf_counter() - begin
        done = 0
        while name == "load" and done < slots:
            done += len(offload.ended(plan).loaded_pages)
        torch.cuda.synchronize()
        spent = time.perf_counter() - begin
        print(
            f"{name}     {total / 1e9 / spent:.1f} GB/s ({slots} pages), given in {given * 1e6 / slots:.1f} us a page",
            flush=True,
        )
    # A step that streams weights, as decoding does: 8 GB read in products of one row.
    weights = torch.randn(64, 8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    x = torch.randn(8192, 1, device=DEVICE, dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for w in weights:
            torch.mm(w, x)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for w in weights:
                torch.mm(w, x)
    for name in ("alone", "beside saves", "beside loads", "beside both"):
        elapsed, host = [], []
        for step in range(60):
            first = 16 * step % (slots - 32)
            saves = [(i, i) for i in range(first, first + 16)] if name in ("beside saves", "beside both") else []
            loads = [(i, slots + i % 64) for i in range(first + 16, first + 32)]
            plan = plan_of(step, [], saves, loads if name in ("beside loads", "beside both") else [], [])
            begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin = time.perf_counter()
            offload.begin(plan)
            with torch.cuda.stream(stream):
                begins.record()
                graph.replay()
                ends.record()
            offload.end()
            host.append(time.perf_counter() - begin)
            ends.synchronize()
            elapsed.append(begins.elapsed_time(ends))
            if plan.load_pages:
                offload.ended(plan)
        middle = sorted(elapsed)[len(elapsed) // 2]
        print(f"step {name:13} {middle:.3f} ms, host {sorted(host)[len(host) // 2] * 1e6:.0f} us", flush=True)
        torch.cuda.synchronize()
    offload.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["check"], help="check, times")
    parser.add_argument("--page-mb", type=float, default=17.7, help="size of a page in MB (mini60: 17.7)")
    parser.add_argument("--host-gb", type=float, default=8.0, help="host memory to pin, in GB")
    args = parser.parse_args()
    page_bytes = int(args.page_mb * 1e6) // 512 * 512
    if "check" in args.what:
        torch.set_num_threads(1)
        large = (1 << 20) if CUDA else 8192
        wrong = [check(300, seed, large if seed % 2 else 4096) for seed in range(10 if CUDA else 2)]
        print(f"check    {sum(wrong)} wrong in {len(wrong)} runs of 300 plans on {DEVICE.type}", flush=True)
        if any(wrong):
            sys.exit(1)
    if "times" in args.what:
        if not CUDA:
            sys.exit("times: there is no GPU here")
        times(page_bytes, int(args.host_gb * 1e9))


if __name__ == "__main__":
    main()
