"""Check what Longturn needs on this machine, one line each."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

from longturn.cli.machine import cpu_name, memory_bytes, usable_cores
from longturn.cli.options import add_config_flags, config_from_args
from longturn.cli.terminal import size_text
from longturn.config import EngineConfig
from longturn.errors import ConfigError, LongturnError


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
    parts: tuple[Callable[[EngineConfig], Check], ...] = (
        python,
        torch,
        compiler,
        served_model,
        device,
        cache_dir,
        machine,
    )
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
    """The compiler that the CPU kernels would be built with. Without one a slower path serves."""
    from longturn.kernels.cpu.build import find_compiler

    command = find_compiler()
    if command is None:
        text = "missing, so the CPU serves slowly; install g++ or clang++, or `pip install ziglang`"
        return Check("C++ compiler", False, text)
    try:
        shown = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("C++ compiler", False, f"{command[0]} does not run: {error}")
    if shown.returncode != 0:
        return Check("C++ compiler", False, f"{command[0]} does not run: exit code {shown.returncode}")
    return Check("C++ compiler", True, next(iter(shown.stdout.splitlines()), command[0]))


def served_model(config: EngineConfig) -> Check:
    """The configured model, the embedded one by default. Its weights are not read."""
    from longturn.source import resolve_source

    name = "embedded model" if config.model.path is None else "model"
    try:
        source = resolve_source(config.model)
        size = size_text(sum(file.stat().st_size for file in source.files))
    except (LongturnError, OSError) as error:
        return Check(name, False, str(error))
    return Check(name, True, f"{source.path.name}, {size}, {source.max_context_tokens:,} tokens of context")


def device(config: EngineConfig) -> Check:
    """What steps of the configured model would run on."""
    from longturn.assemble import on_gpu, why_on_cpu

    try:
        if on_gpu(config):
            import torch

            properties = torch.cuda.get_device_properties(0)
            return Check("device", True, f"{properties.name}, {properties.total_memory / (1 << 30):.0f} GiB")
        why = "as configured" if config.executor.device == "cpu" else why_on_cpu(config)
    except ConfigError as error:
        return Check("device", False, str(error))
    except (LongturnError, ImportError, OSError):
        return Check("device", True, "CPU, as far as can be told without the model or PyTorch")
    return Check("device", True, f"CPU: {why}")


def cache_dir(config: EngineConfig) -> Check:
    from longturn.prepared import require_writable

    try:
        folder = require_writable(config.cache_dir)
    except ConfigError as error:
        return Check("cache directory", False, str(error).removeprefix("cache directory "))
    return Check("cache directory", True, f"{folder}, {size_text(shutil.disk_usage(folder).free)} free")


def machine(config: EngineConfig) -> Check:
    memory = memory_bytes()
    size = f", {memory / (1 << 30):.0f} GiB memory" if memory else ""
    return Check("machine", True, f"{cpu_name()}, {usable_cores()} cores{size}")
