"""Longturn beside llama.cpp on this machine's CPU: the same GGUF, the same number of threads, one run.

    python benchmarks/cpu.py [--threads 2] [--repeats 5] [--json]      (or: make bench-cpu)

Both engines are loaded, each in a process of its own, and take turns at every measurement, so that a change in the
machine's speed hits both. Prompts are random token ids; outputs are greedy and of fixed length; Longturn is driven
through its whole engine (scheduler, pages, sampler) without HTTP, llama.cpp through its server's completion handler
without HTTP, timed by its own clock. The peer is the PyPI package xllamacpp: llama.cpp prebuilt, so it may not use
every instruction that this machine has; the table names the features it reports. Therefore Longturn is measured twice
on a machine with AVX-512: as it is, and with its kernels compiled for AVX2 alone.

Then, for Longturn alone: a warm turn of a 4,000-token session, and start to first token and memory of the real server.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longturn.config import EngineConfig
    from longturn.engine.loop import Engine

PROMPT, OUTPUT, PREFILL, STREAMS = 128, 128, 1024, 8
SESSION_TOKENS, NEW_TOKENS = 4000, 32
ENGINES = ("longturn", "longturn-avx2", "llama.cpp")
MEASUREMENTS = ("decode_1", "decode_8", "prefill_1024")
LABELS = {
    "decode_1": "decode, 1 stream",
    "decode_8": f"decode, {STREAMS} streams together",
    "prefill_1024": f"prefill of {PREFILL:,} tokens",
}
GOALS = {"decode_1": 1.0, "decode_8": 1.5, "prefill_1024": 1.8}

Measure = Callable[[str], float]


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(count)]


# --- the two engines, each in a worker process ------------------------------------------------------------------------


class Longturn:
    """The whole engine in this process; `arch` compiles the kernels for another instruction set than this machine's."""

    def __init__(self, threads: int, arch: str | None = None) -> None:
        from longturn.assemble import build_engine
        from longturn.config import EngineConfig, ExecutorConfig

        config = EngineConfig(executor=ExecutorConfig(threads=threads))
        self.engine = build_engine(config) if arch is None else _engine_for(config, threads, arch)
        self.rng = random.Random(0)
        self.number = 0

    def describe(self) -> str:
        return str(self.engine.executor.info.device)

    def add(self, prompt: list[int], output: int) -> None:
        from longturn.engine.hashing import page_hashes, salt_key
        from longturn.engine.records import EngineRequest, SamplingParams, pack_tokens

        data, key = pack_tokens(prompt), salt_key("benchmark")
        sampling = SamplingParams(max_tokens=output, temperature=0.0)
        self.number += 1
        self.engine.add(EngineRequest(f"b{self.number}", data, page_hashes(data, key), sampling, hash_key=key))

    def run(self, streams: int) -> tuple[float, float, int]:
        """(when every stream had its first token, when all had ended, tokens generated after the former)."""
        started: set[str] = set()
        all_started, after = 0.0, 0
        while self.engine.has_work():
            step = self.engine.step()
            for output in step.outputs if step else ():
                if all_started:
                    after += len(output.token_ids)
                elif output.token_ids:
                    started.add(output.request_id)
            if not all_started and len(started) == streams:
                all_started = time.perf_counter()
        return all_started, time.perf_counter(), after

    def first_token_s(self, prompt: list[int]) -> float:
        begin = time.perf_counter()
        self.add(prompt, 1)
        return self.run(1)[1] - begin

    def measure(self, what: str) -> float:
        if what == "prefill_1024":
            return PREFILL / self.first_token_s(tokens(self.rng, PREFILL))
        if what == "warm_turn":
            prompt = tokens(self.rng, SESSION_TOKENS)
            cold = self.first_token_s(prompt)
            return cold / self.first_token_s(prompt + tokens(self.rng, NEW_TOKENS))
        streams = 1 if what == "decode_1" else STREAMS
        for _ in range(streams):
            self.add(tokens(self.rng, PROMPT), OUTPUT)
        begin, end, count = self.run(streams)
        return count / (end - begin)


class LlamaCpp:
    """llama.cpp's server in this process, without HTTP."""

    def __init__(self, threads: int) -> None:
        import xllamacpp

        from longturn.source import embedded_gguf

        params = xllamacpp.CommonParams()
        params.model.path = str(embedded_gguf())
        params.n_parallel = STREAMS
        params.n_ctx = STREAMS * 2 * PREFILL
        params.n_gpu_layers = 0
        params.cpuparams.n_threads = threads
        params.cpuparams_batch.n_threads = threads
        params.kv_unified = True
        self.server = xllamacpp.Server(params)
        self.rng = random.Random(0)
        self.info = str(xllamacpp.get_system_info())

    def describe(self) -> str:
        enabled = [part.split(" = ")[0] for part in self.info.split("|") if part.strip().endswith("= 1")]
        features = " ".join(part.split(":")[-1].strip() for part in enabled)
        return f"xllamacpp {_version('xllamacpp')}: {features}"

    def complete(self, prompt: int, output: int) -> dict[str, float]:
        body = {
            "prompt": tokens(self.rng, prompt),
            "n_predict": output,
            "temperature": 0,
            "cache_prompt": False,
            "ignore_eos": True,
            "stream": False,
        }
        reply = self.server.handle_completions(body)
        timings: dict[str, float] = (json.loads(reply) if isinstance(reply, str | bytes) else reply)["timings"]
        return timings

    def measure(self, what: str) -> float:
        if what == "prefill_1024":
            return self.complete(PREFILL, 1)["prompt_per_second"]
        if what == "decode_1":
            return self.complete(PROMPT, OUTPUT)["predicted_per_second"]
        found: list[dict[str, float]] = []
        threads = [threading.Thread(target=lambda: found.append(self.complete(PROMPT, OUTPUT))) for _ in range(STREAMS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # The longest stream's own decode time: it excludes the prompts' computation, which favours the peer.
        return sum(t["predicted_n"] for t in found) / (max(t["predicted_ms"] for t in found) / 1e3)


def _engine_for(config: EngineConfig, threads: int, arch: str) -> Engine:
    from longturn.engine.clock import SystemClock
    from longturn.engine.loop import Engine
    from longturn.executor.cpu import CpuExecutor
    from longturn.executor.native_model import NativeCpuModel
    from longturn.kernels.cpu.build import build
    from longturn.kernels.cpu.native import NativeLibrary
    from longturn.models.packed import load_packed
    from longturn.source import resolve_source

    source = resolve_source(config.model)
    library = NativeLibrary(build(arch=(f"-march={arch}",)))
    decoder = load_packed(source).decoder(library, threads=threads)
    pages = config.cache.memory_bytes // decoder.page_bytes
    model = NativeCpuModel(decoder, pages=pages, max_context_tokens=source.max_context_tokens, isa=library.isa)
    executor = CpuExecutor(model, rows=config.scheduler.max_running)
    return Engine(executor, config.scheduler, config.cache, SystemClock())


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def worker(engine: str, threads: int) -> int:
    """Answer one measurement a line until standard input ends."""
    makers: dict[str, Callable[[], Longturn | LlamaCpp]] = {
        "longturn": lambda: Longturn(threads),
        "longturn-avx2": lambda: Longturn(threads, "x86-64-v3"),
        "llama.cpp": lambda: LlamaCpp(threads),
    }
    target = makers[engine]()
    target.measure("decode_1")
    print(json.dumps({"ready": target.describe()}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"value": target.measure(line.strip())}), flush=True)
    return 0


@contextlib.contextmanager
def engine(name: str, threads: int) -> Iterator[tuple[str, Measure]]:
    command = [sys.executable, __file__, "--worker", name, "--threads", str(threads)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def answer(key: str) -> Any:
        for line in stdout:
            if line.startswith("{"):
                return json.loads(line)[key]
        raise SystemExit(f"the {name} worker ended (run it by hand: {' '.join(command)})")

    def measure(what: str) -> float:
        stdin.write(what + "\n")
        stdin.flush()
        return float(answer("value"))

    try:
        yield answer("ready"), measure
    finally:
        stdin.close()
        process.wait(30)


# --- the real server --------------------------------------------------------------------------------------------------


def server_start(threads: int) -> tuple[float, float]:
    """(seconds from the command to the first token over HTTP, resident megabytes of all its processes after it)."""
    import urllib.request

    import psutil

    command = [sys.executable, "-m", "longturn.cli.main", "serve", "--port", "0", "--json", "--threads", str(threads)]
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = next(json.loads(line)["ready"] for line in process.stdout if "ready" in json.loads(line))
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 1}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=60).read()
        seconds = time.perf_counter() - begin
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        return seconds, sum(p.memory_info().rss for p in family) / 1e6
    finally:
        process.terminate()
        process.wait(20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.worker, args.threads)
    if importlib.util.find_spec("xllamacpp") is None:
        raise SystemExit("the peer is missing: pip install xllamacpp")

    found: dict[str, dict[str, list[float]]] = {m: {e: [] for e in ENGINES} for m in MEASUREMENTS}
    warm: list[float] = []
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(engine(name, args.threads)) for name in ENGINES}
        for repeat in range(args.repeats):
            for what in MEASUREMENTS:
                for name, (_, measure) in workers.items():
                    found[what][name].append(measure(what))
            warm.append(workers["longturn"][1]("warm_turn"))
            print(f"repeat {repeat + 1} of {args.repeats} done", file=sys.stderr)
        described = {name: description for name, (description, _) in workers.items()}
    starts = [server_start(args.threads) for _ in range(3)]
    result = {
        "threads": args.threads,
        "repeats": args.repeats,
        "engines": described,
        "measurements": found,
        "medians": {m: {e: statistics.median(v) for e, v in engines.items()} for m, engines in found.items()},
        "warm_turn_ratio": warm,
        "start_to_first_token_s": [s for s, _ in starts],
        "resident_mb": [mb for _, mb in starts],
    }
    if args.json:
        print(json.dumps(result))
    else:
        report(result)
    return 0


def report(result: dict[str, Any]) -> None:
    for name, description in result["engines"].items():
        print(f"{name:14} {description}")
    print(
        f"\n{'tok/s, median [least-most]':32}" + "".join(f"{name:>18}" for name in ENGINES) + "   ratio  AVX2    goal"
    )
    for what, engines in result["measurements"].items():
        cells = "".join(f"{statistics.median(v):8.1f} [{min(v):.0f}-{max(v):.0f}]".rjust(18) for v in engines.values())
        ours, avx2, theirs = (statistics.median(engines[name]) for name in ENGINES)
        print(f"{LABELS[what]:32}{cells}  {ours / theirs:5.2f}x {avx2 / theirs:5.2f}x {GOALS[what]:5.1f}x")
    ratios = result["warm_turn_ratio"]
    spread = f"[{min(ratios):.1f}-{max(ratios):.1f}]"
    label = f"first token, {SESSION_TOKENS:,} cached + {NEW_TOKENS} new: cold / warm"
    print(f"\n{label}  {statistics.median(ratios):.1f}x {spread}, goal 20x")
    print(
        f"start to first token over HTTP  {statistics.median(result['start_to_first_token_s']):.2f} s, goal under 6 s"
    )
    print(
        f"resident memory of all server processes  {statistics.median(result['resident_mb']):.0f} MB, goal under 1200"
    )


if __name__ == "__main__":
    sys.exit(main())
