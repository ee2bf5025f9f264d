"""Session trees by what a command line calls them: files, folders, and traces that come with the package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longturn.bench.traces.tree import SessionTree

SHIPPED = ("arrivals.jsonl", "desk.jsonl", "workers.jsonl", "workshop.json")
"""Those of the package, for help texts, which must not look for files."""


def named_traces(names: Sequence[str], *, split: bool) -> list[SessionTree]:
    """The sessions of files, folders and shipped traces. A file here is meant before a shipped trace of its name.

    Args:
        names: as they were given.
        split: find agents in flattened captures.

    Raises:
        TraceError: a name is of nothing, or a file is no trace.
    """
    from longturn.bench.traces.errors import TraceError
    from longturn.bench.traces.load import load_shipped, load_traces, shipped_traces

    shipped = [name for name in names if name in shipped_traces() and not Path(name).exists()]
    others = [name for name in names if name not in shipped]
    for name in others:
        if Path(name).name == name and not Path(name).exists():
            known = ", ".join(shipped_traces())
            raise TraceError(f"{name}: no such file or folder, nor a trace of the package ({known})")
    trees = [tree for name in dict.fromkeys(shipped) for tree in load_shipped(name, split=split)]
    return trees + load_traces([Path(name) for name in others], split=split)
