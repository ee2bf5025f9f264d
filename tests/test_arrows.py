"""Imports between rooms go one way, and the rooms that must stay light import nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "longturn"
LEAVES = {"config", "errors", "source", "prepared", "gguf_file", "grammar_library", "json_log"}
TOP = {"assemble", "engine_process", "llm"}
"""Modules that put the parts together; only `cli`, `server` (lazily) and each other may import them."""

ALLOWED: dict[str, set[str]] = {
    "engine": set(),
    "frontend": {"engine"},
    "server": {"frontend", "engine", *TOP},
    "kernels": set(),
    "ops": {"kernels"},
    "models": {"ops", "kernels"},
    "executor": {"models", "ops", "kernels", "engine"},
    "bench": set(),
    "report": set(),
    "simulate": {"engine", "bench"},
    "cli": {
        "server",
        "frontend",
        "engine",
        "executor",
        "models",
        "ops",
        "kernels",
        "bench",
        "report",
        "simulate",
        *TOP,
    },
}
WEB = {"msgspec", "zmq", "starlette", "uvicorn", "aiohttp", "prometheus_client", "pydantic"}
FORBIDDEN: dict[str, set[str]] = {
    "engine": WEB | {"torch", "numpy", "jinja2", "tokenizers"},
    "executor": WEB,
    "models": WEB,
    "ops": WEB,
    "kernels": WEB,
    "frontend": {"torch", "starlette", "uvicorn"},
    "server": {"torch"},
    "bench": {"torch", "zmq", "starlette"},
    "report": {"torch", "zmq", "starlette"},
    "simulate": {*WEB, "torch"},
}


def imports(path: Path) -> set[str]:
    """Absolute names of everything that a file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def files(room: str) -> list[Path]:
    return sorted((SOURCE / room).rglob("*.py"))


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_arrows_between_rooms(room: str) -> None:
    assert files(room), f"room {room} is empty"
    for path in files(room):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] != "longturn" or len(parts) == 1 or parts[1] in LEAVES | {room, "__version__", "LLM"}:
                continue
            assert parts[1] in ALLOWED[room], f"{path.relative_to(SOURCE)} imports {name}"


def test_leaves_import_leaves_only() -> None:
    for leaf in sorted(LEAVES):
        for name in imports(SOURCE / f"{leaf}.py"):
            parts = name.split(".")
            assert parts[0] != "longturn" or parts[1] in LEAVES | {"__version__"}, f"{leaf}.py imports {name}"
            assert parts[0] != "torch", f"{leaf}.py imports torch"


@pytest.mark.parametrize("room", sorted(FORBIDDEN))
def test_heavy_imports_stay_out(room: str) -> None:
    for path in files(room):
        for name in imports(path):
            assert name.split(".")[0] not in FORBIDDEN[room], f"{path.relative_to(SOURCE)} imports {name}"


def test_engine_has_one_source_of_time() -> None:
    for path in files("engine"):
        if path.name != "clock.py":
            assert not {n.split(".")[0] for n in imports(path)} & {"time", "datetime", "random", "os"}, path.name


def test_server_process_imports_no_torch() -> None:
    """Transitively, too: the HTTP process starts fast and stays small."""
    code = (
        "import sys, longturn.server.app, longturn.frontend.frontend, longturn.frontend.remote_engine\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_table_names_every_room() -> None:
    rooms = {p.name for p in SOURCE.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert rooms == set(ALLOWED)
