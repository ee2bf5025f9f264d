"""Print the version of Longturn and of what it runs on."""

from __future__ import annotations

import argparse
import json
import platform
from importlib import metadata


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


def installed_version(package: str) -> str | None:
    """Version of an installed package, without importing it; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def longturn_version() -> str:
    """Version of this package; `0+source` where it runs from a source tree without being installed."""
    return installed_version("longturn") or "0+source"


def run(args: argparse.Namespace) -> int:
    versions = {
        "longturn": longturn_version(),
        "python": platform.python_version(),
        "torch": installed_version("torch"),
    }
    if args.json:
        print(json.dumps(versions))
    else:
        print(
            f"longturn {versions['longturn']} (Python {versions['python']}, PyTorch {versions['torch'] or 'missing'})"
        )
    return 0
