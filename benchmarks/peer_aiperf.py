"""`longturn bench agentx` and aiperf on the same server and the same trace, turn about.

    python benchmarks/peer_aiperf.py --aiperf VENV/bin/aiperf [--against null|longturn] [--repeats 3] [--json FILE]

`null` is a server without a model that streams at a fixed pace: what the clients report can be checked against it.
`longturn` is `longturn serve` on the embedded model, started anew for each run so that no run finds another's prompts
cached. Both clients read one Mooncake trace, send completions, and take the server's token counts. aiperf needs a
virtual environment of its own (`pip install aiperf`). CPU seconds are user and system time of a client's whole process
tree, start-up included.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longturn.bench.null_protocol import NullOptions
from longturn.bench.null_server import null_server
from longturn.cli.local_server import local_server
from longturn.cli.terminal import table
from longturn.config import EngineConfig, ExecutorConfig
from longturn.report.point import load_point

NULL_MODEL = "no-model"
TOKENIZER = "local/smollm2"
_COMMIT = "0" * 40
_PR_SET_CHILD_SUBREAPER = 36
FIGURES = {
    "TTFT p50, ms": "ttft_p50",
    "TTFT p90, ms": "ttft_p90",
    "ITL p50, ms": "itl_p50",
    "ITL p90, ms": "itl_p90",
    "output tok/s": "output_rate",
    "total tok/s": "total_rate",
    "requests": "requests",
    "input tokens, mean": "input_mean",
    "TTFT mean, ms": "ttft_mean",
    "TTFT mean over server's own, ms": "ttft_over",
    "ITL mean, ms": "itl_mean",
    "ITL mean over server's own, ms": "itl_over",
    "CPU s": "cpu_s",
}


@dataclass(frozen=True)
class Load:
    """One workload for both clients."""

    concurrency: int
    duration_s: float
    seed: int
    input_lengths: tuple[int, ...]
    ttft_ms: float
    itl_ms: float
    """Both of the null server."""


# --- servers ---------------------------------------------------------------------------------------------------------


@contextmanager
def null_target(load: Load) -> Iterator[str]:
    """Not shared cores: this server writes nothing late, and its clients are to show what they cost."""
    rate, tokens = 1000 / load.itl_ms, sum(load.input_lengths) // len(load.input_lengths)
    options = NullOptions(ttft_s=load.ttft_ms / 1000, rate=rate, prompt_tokens=tokens, model=NULL_MODEL)
    with null_server(options) as url:
        yield url


@contextmanager
def longturn_target(load: Load) -> Iterator[str]:
    """The server on half of the cores: a client that shares them slows down what it measures."""
    cores = sorted(os.sched_getaffinity(0))
    half = cores[: max(1, len(cores) // 2)]
    os.sched_setaffinity(0, half)  # processes inherit it
    try:
        with local_server(EngineConfig(executor=ExecutorConfig(threads=len(half)))) as url:
            os.sched_setaffinity(0, cores[len(half) :] or cores)
            yield url
    finally:
        os.sched_setaffinity(0, cores)


# --- the trace and the tokenizer -------------------------------------------------------------------------------------


def write_trace(path: Path, lengths: Sequence[int], seed: int) -> None:
    """Mooncake lines of single requests, each of blocks of its own.

    Not sessions: aiperf takes the length of a Mooncake session's turn as what it adds, this project as the whole
    prompt's. Not shared blocks: aiperf keeps them from session to session, here a marker sets each session apart.
    """
    # The clients take the lines in different orders: narrow ranges, so that both send about the same.
    random_ = random.Random(seed)
    block, lines = 0, []
    for _ in range(2000):
        length = random_.choice(lengths)
        blocks = -(-length // 512)
        line = {"input_length": length, "output_length": random_.choice((40, 44, 48))}
        lines.append(json.dumps({**line, "hash_ids": list(range(block, block + blocks))}))
        block += blocks
    path.write_text("\n".join(lines) + "\n")


def write_tokenizer(cache: Path) -> None:
    """The embedded model's tokenizer in a cache folder of huggingface_hub, as `TOKENIZER`.

    aiperf 0.13 loads a tokenizer again in its decoding processes, offline, and looks for it in the cache alone: a
    folder's path fails there.
    """
    from transformers import PreTrainedTokenizerFast

    from longturn.frontend.gguf_tokenizer import gguf_backend
    from longturn.gguf_file import read_gguf
    from longturn.source import embedded_gguf

    path = embedded_gguf()
    backend, special = gguf_backend(read_gguf(path, max_array=None).metadata, str(path))
    repository = cache / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, **special)  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(repository / "snapshots" / _COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(_COMMIT)


# --- one run of each client ------------------------------------------------------------------------------------------


def timed(command: Sequence[str], folder: Path, **environment: str) -> float:
    """Run a command; returns the CPU seconds of its whole process tree.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    folder.mkdir(parents=True)
    log, usage = folder / "log.txt", folder / "cpu.json"
    with log.open("wb") as out:
        code = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "count-cpu", str(usage), *command],
            stdout=out,
            stderr=out,
            cwd=folder,
            env={**os.environ, **environment},
        ).returncode
    if code:
        raise RuntimeError(f"{command[0]} ended with {code}:\n{log.read_text(errors='replace')[-2000:]}")
    return float(json.loads(usage.read_text()))


def count_cpu(path: Path, command: Sequence[str]) -> int:
    """Run a command and write the user and system seconds of all its processes, orphans included."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(command)
    seconds, code = 0.0, 0
    while True:
        try:
            pid, status, used = os.wait4(-1, 0)
        except ChildProcessError:
            break
        seconds += used.ru_utime + used.ru_stime
        code = os.waitstatus_to_exitcode(status) if pid == child.pid else code
    path.write_text(json.dumps(seconds))
    return code


def run_longturn(url: str, trace: Path, load: Load, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "longturn.cli.main", "bench", "agentx", "--url", url, "--traces", str(trace)]
    command += ["--api", "completions", "--concurrency", str(load.concurrency)]
    command += ["--duration", str(load.duration_s), "--seed", str(load.seed), "--out", str(folder / "out")]
    cpu_s = timed(command, folder)
    found = load_point(folder / "out" / f"agentx-{load.concurrency:04d}.json").metrics
    assert found.ttft_ms is not None and found.itl_ms is not None, "no request was answered"
    return {
        "ttft_mean": found.ttft_ms.mean,
        "itl_mean": found.itl_ms.mean,
        "ttft_p50": found.ttft_ms.p50,
        "ttft_p90": found.ttft_ms.p90,
        "itl_p50": found.itl_ms.p50,
        "itl_p90": found.itl_ms.p90,
        "output_rate": found.output_tokens_per_s or 0.0,
        "total_rate": found.total_tokens_per_s or 0.0,
        "requests": found.requests - found.errors,
        "errors": found.errors,
        "input_mean": found.prompt_tokens / max(1, found.requests - found.errors),
        "cpu_s": cpu_s,
    }


def run_aiperf(
    aiperf: Path, url: str, model: str, cache: Path, trace: Path, load: Load, folder: Path
) -> dict[str, float]:
    command = [str(aiperf), "profile", "--url", url, "--model", model, "--tokenizer", TOKENIZER]
    command += ["--endpoint-type", "completions", "--streaming", "--use-legacy-max-tokens", "--use-server-token-count"]
    command += ["--input-file", str(trace), "--custom-dataset-type", "mooncake-trace"]
    command += ["--concurrency", str(load.concurrency), "--random-seed", str(load.seed)]
    command += ["--benchmark-duration", str(load.duration_s), "--benchmark-grace-period", "60"]
    command += ["--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0", "--ui", "none"]
    command += ["--no-gpu-telemetry", "--no-server-metrics", "--artifact-dir", str(folder / "out")]
    cpu_s = timed(command, folder, HF_HOME=str(cache), HF_HUB_OFFLINE="1")
    summary = json.loads((folder / "out" / "profile_export_aiperf.json").read_text())
    ttft, itl = summary["time_to_first_token"], summary["inter_token_latency"]
    return {
        "ttft_mean": ttft["avg"],
        "itl_mean": itl["avg"],
        "ttft_p50": ttft["p50"],
        "ttft_p90": ttft["p90"],
        "itl_p50": itl["p50"],
        "itl_p90": itl["p90"],
        "output_rate": summary["output_token_throughput"]["avg"],
        "total_rate": summary["total_token_throughput"]["avg"],
        "requests": summary["request_count"]["avg"],
        "errors": summary.get("error_request_count", {}).get("avg", 0),
        "input_mean": summary["input_sequence_length"]["avg"],
        "cpu_s": cpu_s,
    }


def server_means(url: str, against: str) -> dict[str, float]:
    """Mean TTFT and time per output token of all requests, as the server itself saw them, ms."""
    path = "/null/log" if against == "null" else "/metrics"
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url + path, timeout=10) as response:
        text = response.read().decode()
    if against == "null":
        streams = json.loads(text)
        return {
            "ttft": statistics.fmean(one["first_ns"] - one["received_ns"] for one in streams) / 1e6,
            "itl": statistics.fmean((one["last_ns"] - one["first_ns"]) / (one["tokens"] - 1) for one in streams) / 1e6,
        }

    def mean_ms(name: str) -> float:
        found = [re.search(rf"^longturn:{name}_{part}{{[^}}]*}} (\S+)$", text, re.M) for part in ("sum", "count")]
        total, count = (float(one[1]) if one else math.nan for one in found)
        return 1000 * total / count

    return {"ttft": mean_ms("ttft_seconds"), "itl": mean_ms("time_per_output_token_seconds")}


# --- both, in turn ---------------------------------------------------------------------------------------------------


def compare(aiperf: Path, against: str, load: Load, repeats: int, keep: Path) -> dict[str, list[dict[str, float]]]:
    """Runs of both clients, taking turns so that a drift of the machine hits both."""
    trace, cache = keep / "trace.jsonl", keep / "hf"
    write_trace(trace, load.input_lengths, load.seed)
    if not cache.exists():
        write_tokenizer(cache)
    target = null_target if against == "null" else longturn_target
    model = NULL_MODEL if against == "null" else "SmolLM2-135M-Instruct"
    runs: dict[str, list[dict[str, float]]] = {"longturn": [], "aiperf": []}
    for number in range(repeats):
        for client in ("longturn", "aiperf") if number % 2 == 0 else ("aiperf", "longturn"):
            folder = keep / f"{against}-{client}-{number}"
            with target(load) as url:
                if client == "longturn":
                    found = run_longturn(url, trace, load, folder)
                else:
                    found = run_aiperf(aiperf, url, model, cache, trace, load, folder)
                own = server_means(url, against)
            found |= {f"{name}_over": found[f"{name}_mean"] - own[name] for name in own}
            runs[client].append(found)
            print(f"{against} {client} {number}: {json.dumps({k: round(v, 3) for k, v in found.items()})}", flush=True)
    return runs


def summary_table(runs: dict[str, list[dict[str, float]]]) -> str:
    """Median and range of each figure, and whether the clients differ by more than their runs do."""
    rows = []
    for title, key in FIGURES.items():
        cells, ranges = [title], []
        for client in ("longturn", "aiperf"):
            values = [run[key] for run in runs[client]]
            ranges.append((min(values), max(values)))
            cells.append(f"{statistics.median(values):,.2f} [{min(values):,.2f}-{max(values):,.2f}]")
        (low_a, high_a), (low_b, high_b) = ranges
        middle = [statistics.median([run[key] for run in runs[client]]) for client in ("longturn", "aiperf")]
        ratio = f"{100 * (middle[0] / middle[1] - 1):+.2f} %"
        cells.append(f"{middle[0] - middle[1]:+.2f}" if key.endswith("_over") else ratio)
        cells.append("yes" if low_a <= high_b and low_b <= high_a else "no")
        rows.append(cells)
    return table(["median [least-most]", "longturn", "aiperf", "difference", "ranges meet"], rows)


def main() -> int:
    if sys.argv[1:2] == ["count-cpu"]:
        return count_cpu(Path(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--aiperf", type=Path, required=True, help="the program, in its own environment")
    parser.add_argument("--against", choices=["null", "longturn"], default="null")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--duration", type=float, default=20.0, help="seconds of each run")
    parser.add_argument("--input", default="640,704,768", help="prompt lengths, tokens")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--ttft-ms", type=float, default=60.0, help="of the null server")
    parser.add_argument("--itl-ms", type=float, default=8.0, help="of the null server")
    parser.add_argument("--keep", type=Path, help="folder for all that the clients write")
    parser.add_argument("--json", type=Path, help="write the figures of every run here")
    args = parser.parse_args()
    lengths = tuple(int(text) for text in args.input.split(","))
    load = Load(args.concurrency, args.duration, args.seed, lengths, args.ttft_ms, args.itl_ms)
    with tempfile.TemporaryDirectory() as scratch:
        keep = (args.keep or Path(scratch)).resolve()
        keep.mkdir(parents=True, exist_ok=True)
        runs = compare(args.aiperf.resolve(), args.against, load, args.repeats, keep)
    print("\n" + summary_table(runs))
    if args.json:
        args.json.write_text(json.dumps(runs, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
