"""What the CPU kernels reach on this machine, beside the floor that memory bandwidth sets.

    python benchmarks/cpu_kernels.py [--threads 2] [--json]

Shapes are SmolLM2-135M's with random 4-bit layers and an 8-bit tied head; no model file is needed. Times are the
least of several runs, with the median beside it: on a shared machine the least is the kernel's and the median the
neighbours'. The floor of a decode step is the weights' bytes (and the cached keys and values it reads) divided by the
streaming-read bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longturn.kernels.cpu.native import DecoderConfig, DecoderWeights, LayerWeights, NativeDecoder, NativeLibrary, load
from longturn.kernels.cpu.packing import PackedMatrix, packed_bytes

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 30, 576, 9, 3, 64, 1536, 49152
LONG = 4096
MATRICES = {
    "q": (HEADS * HEAD_DIM, HIDDEN),
    "k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD_DIM),
    "gate": (FFN, HIDDEN),
    "up": (FFN, HIDDEN),
    "down": (HIDDEN, FFN),
}


def random_matrix(rng: np.random.Generator, kind: Any, rows: int, cols: int) -> PackedMatrix:
    """A packed matrix of random quants with small positive scales (written straight into the layout)."""
    size = packed_bytes(kind, rows, cols)
    quants, scales = (256, 64) if kind == "q4_1" else (512, 32)
    data = rng.integers(0, 256, size, dtype=np.uint8).reshape(-(-rows // 16), -1)
    end = cols // 32 * quants
    halves = np.zeros((data.shape[0], (data.shape[1] - end) // 2), np.float16)
    halves[:] = 0.3 / cols**0.5
    if kind == "q4_1":
        halves.reshape(data.shape[0], -1, scales // 2)[:, :, 16:] = -7.5 * 0.3 / cols**0.5
    data[:, end:] = halves.view(np.uint8)
    return PackedMatrix(kind, rows, cols, data.reshape(-1))


def random_model(rng: np.random.Generator, threads: int) -> tuple[DecoderConfig, DecoderWeights]:
    ones = np.ones(HIDDEN, np.float32)
    layers = []
    for _ in range(LAYERS):
        m = {name: random_matrix(rng, "q4_1", *shape) for name, shape in MATRICES.items()}
        layers.append(LayerWeights(m["q"], m["k"], m["v"], m["o"], m["gate"], m["up"], m["down"], ones, ones))
    angles = np.outer(np.arange(2 * LONG), 1e5 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    head = random_matrix(rng, "q8_0", VOCAB, HIDDEN)
    weights = DecoderWeights(
        tuple(layers), head, head, ones, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    )
    return DecoderConfig(HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, 1e-5, threads=threads), weights


def timed(run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """(least, median) seconds of `run`."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds), float(np.median(seconds))


def read_bandwidth(threads: int, size_bytes: int) -> float:
    """Bytes a second of summing an array once, split over threads."""
    array = np.ones(size_bytes // 8, np.int64)
    parts = np.array_split(array, threads)
    with ThreadPoolExecutor(threads) as pool:
        least, _ = timed(lambda: list(pool.map(np.sum, parts)), 15)
    return array.nbytes / least


def i32(values: Any) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(values, np.int32)


def measure(library: NativeLibrary, threads: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    config, weights = random_model(rng, threads)
    decoder = NativeDecoder(library, config, weights)
    cache = decoder.new_cache(9 * LONG // 128 + 1)
    tables = i32(np.arange(1, 9 * LONG // 128 + 1).reshape(9, -1))
    layer_bytes = sum(m.data.nbytes for la in weights.layers for m in (la.q, la.k, la.v, la.o, la.gate, la.up, la.down))
    weight_bytes = layer_bytes + weights.head.data.nbytes
    kv_token_bytes = decoder.page_bytes // 128
    bandwidth = read_bandwidth(threads, weight_bytes)

    def prefill(row: int, begin: int, count: int) -> None:
        decoder.forward(
            i32(rng.integers(0, VOCAB, count)), i32(np.arange(begin, begin + count)), i32(np.full(count, row)),
            tables, i32([count - 1]), cache,
        )  # fmt: skip

    def decode(batch: int, context: int) -> None:
        decoder.forward(
            i32(rng.integers(0, VOCAB, batch)), i32(np.full(batch, context - 1)), i32(np.arange(batch)), tables,
            i32(np.arange(batch)), cache, logits=False, argmax=True,
        )  # fmt: skip

    for begin in range(0, LONG, 512):
        prefill(0, begin, 512)
    for row in range(1, 9):
        for page in range(LONG // 128):
            cache[tables[row, page]] = cache[tables[0, page]]
    rows = []

    def prefill_1024() -> None:
        prefill(8, 0, 512)
        prefill(8, 512, 512)

    def report(name: str, tokens: int, floor_bytes: int, run: Callable[[], object], repeats: int) -> None:
        least, median = timed(run, repeats)
        floor = floor_bytes / bandwidth
        rows.append(
            {
                "case": name,
                "least_us": least * 1e6,
                "median_us": median * 1e6,
                "tokens_per_s": tokens / least,
                "bytes": floor_bytes,
                "gb_per_s": floor_bytes / least / 1e9,
                "floor_us": floor * 1e6,
                "share_of_read_bandwidth": floor / least,
            }
        )

    for batch in (1, 2, 4, 8):
        report(f"decode, batch {batch}, context 128", batch, weight_bytes, partial(decode, batch, 128), 60)
    for batch in (1, 8):
        moved = weight_bytes + batch * LONG * kv_token_bytes
        report(f"decode, batch {batch}, context {LONG}", batch, moved, partial(decode, batch, LONG), 20)
    report("prefill, 1024 tokens", 1024, weight_bytes, prefill_1024, 5)
    report("prefill, 512 tokens to 4096", 512, weight_bytes, lambda: prefill(8, LONG - 512, 512), 3)
    report("warm turn, 32 tokens to 4096", 32, weight_bytes, lambda: prefill(0, LONG - 32, 32), 10)
    decoder.close()
    return {
        "isa": library.isa,
        "amx": library.amx,
        "threads": threads,
        "read_gb_per_s": bandwidth / 1e9,
        "weight_bytes": weight_bytes,
        "kv_bytes_per_token": kv_token_bytes,
        "results": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache-dir", type=Path, default=None, help="directory of the compiled library")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    found = measure(load(args.cache_dir), args.threads)
    if args.json:
        json.dump(found, sys.stdout, indent=1)
        print()
        return 0
    print(
        f"{found['isa']}{' + amx' if found['amx'] else ''}, {found['threads']} threads, "
        f"reads {found['read_gb_per_s']:.1f} GB/s, weights {found['weight_bytes'] / 1e6:.1f} MB"
    )
    print(f"{'':34}{'least':>10}{'median':>10}{'tok/s':>9}{'GB/s':>7}{'floor':>10}{'of read':>9}")
    for r in found["results"]:
        print(
            f"{r['case']:34}{r['least_us']:8.0f}us{r['median_us']:8.0f}us{r['tokens_per_s']:9.0f}{r['gb_per_s']:7.1f}"
            f"{r['floor_us']:8.0f}us{r['share_of_read_bandwidth']:9.0%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
