"""What `bench agentx` replays and `simulate` simulates: the flags that both have, and what their values stand for."""

from __future__ import annotations

from typing import Any

from longturn.cli.named_traces import SHIPPED
from longturn.errors import ConfigError

PRESET_NAMES = ("agentx", "agentx-mvp", "quick")
_MOST_LANES = 4096


def add_sessions(load: Any, *, concurrency_default: str) -> None:
    """Flags for which sessions are replayed and how many at once; `load` is a group of arguments."""
    load.add_argument(
        "--traces",
        nargs="+",
        default=["workshop.json"],
        metavar="PATH",
        help=f"trace files, folders, or some of the package: {', '.join(SHIPPED)} [workshop.json]",
    )
    load.add_argument(
        "--concurrency",
        default=concurrency_default,
        metavar="N,N",
        help=f"session trees alive at once, one point each [{concurrency_default}]",
    )
    load.add_argument("--max-context", type=int, metavar="N", help="drop requests of more tokens, output included")
    load.add_argument(
        "--scale-context", type=float, default=1.0, metavar="F", help="shrink sessions, keeping their structure [1]"
    )


def concurrency(text: str) -> list[int]:
    """`1,2,4` as numbers, in the order given."""
    try:
        found = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"--concurrency must be numbers with commas between, not '{text}'") from None
    for count in found:
        if not 1 <= count <= _MOST_LANES:
            raise ConfigError(f"--concurrency must be between 1 and {_MOST_LANES}, not {count}")
    return found


def token_ids(text: str | None, api: str) -> range | None:
    """`1000-9000` as ids, both ends included."""
    if text is None:
        return None
    if api != "completions":
        raise ConfigError("--token-ids needs --api completions")
    low, dash, high = text.partition("-")
    if not (dash and low.isdecimal() and high.isdecimal() and int(high) - int(low) >= 31):
        raise ConfigError(f"--token-ids must be LOW-HIGH with at least 32 ids, not '{text}'")
    return range(int(low), int(high) + 1)
