"""The result file: everything a replay measured, and everything needed to run it again.

Times are milliseconds and rates are tokens per second in the file; ratios are 0..1. A reader refuses versions that it
does not know and fields that it does not expect: a result that is half understood is worse than none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from longturn.errors import LongturnError

KIND = "longturn-replay"
VERSION = 1


class ResultError(LongturnError):
    """A result file is missing, is not JSON, or does not follow the schema."""

    exit_code = 2
    http_status = 400


class TurnResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of one session. Figures are None where the turn failed or the server did not tell."""

    session: str
    index: int
    label: str
    prompt_tokens: int | None
    cached_tokens: int | None
    """None if the server reports no such count, which is not the same as 0."""
    output_tokens: int | None
    ttft_ms: float | None
    itl_ms: float | None
    """Mean time per output token after the first event, to the end of the response."""
    e2e_ms: float
    lag_ms: float
    """How much later than scheduled the client sent the request."""
    finish: str | None = None
    error: str | None = None

    @property
    def output_tokens_per_s(self) -> float | None:
        return 1000 / self.itl_ms if self.itl_ms else None


class Totals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    requests: int
    errors: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    hit_rate: float | None
    duration_ms: float
    """First request's start to last successful answer's end, pauses included."""
    ttft_sum_ms: float
    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    itl_p50_ms: float | None
    itl_p90_ms: float | None
    e2e_p50_ms: float | None
    e2e_p90_ms: float | None
    interactivity_p50: float | None
    interactivity_p90: float | None
    """1 / P90(ITL): nine of ten responses are at least this fast."""
    total_tokens_per_s: float | None
    """Input (cached too) and output."""
    output_tokens_per_s: float | None
    lag_max_ms: float


class Served(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the server's list of models told of the one that was measured; None where it did not tell."""

    engine: str | None = None
    """`longturn`, `vllm` or `sglang`."""
    version: str | None = None
    """Of the engine."""
    quantisation: str | None = None
    """Weights as served: `bf16`, `q4_1` ..."""
    weights: str | None = None
    """How Longturn computes with them: `packed` or `fp32`."""
    kv_cache: str | None = None
    """Data type of the KV cache."""


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pass over the sessions against one configuration."""

    name: str
    server: str
    """How the server was started, or its address."""
    turns: tuple[TurnResult, ...]
    totals: Totals
    partial: bool
    """Turns are missing: interrupted, or ended by errors. Not comparable with a whole run."""
    served: Served | None = None
    """None in files of versions that did not ask."""


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where it ran. The client's machine; the server's too where both are one."""

    longturn: str
    python: str
    torch: str | None
    system: str
    cpu: str
    cores: int
    memory_bytes: int | None


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    title: str
    created: str
    """UTC, ISO 8601."""
    command: str
    """What a reader types to measure it again."""
    model: str
    sessions: tuple[str, ...]
    description: str
    lanes: int
    pause_scale: float
    fixed_output: bool
    separate_caches: bool
    environment: Environment
    runs: tuple[Run, ...]
    """The run of interest first; a second one is its baseline."""
    kind: str = KIND
    version: int = VERSION

    @property
    def partial(self) -> bool:
        return any(run.partial for run in self.runs)


class _Header(msgspec.Struct):
    """Enough of any result file to tell whether this code reads it."""

    kind: str | None = None
    version: int | None = None


def kind_of(data: bytes) -> str | None:
    """The kind of result file that the data says it is, readable or not by this version; None if it is no result."""
    try:
        return msgspec.json.decode(data, type=_Header).kind
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def read_file(path: Path) -> bytes:
    """The bytes of a file. Raises ResultError, which names it, if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror or error}") from error


def write_whole(path: Path, data: bytes) -> None:
    """Write a file under a temporary name and rename it, creating its folder.

    Raises:
        ResultError: the folder cannot be written.
    """
    scratch = _scratch(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(data)
        scratch.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise ResultError(f"cannot write {path}: {error.strerror or error}") from error


def check_writable(folder: Path) -> None:
    """Make a folder and write to it: better refused now than after an hour's measurement.

    Raises:
        ResultError: the folder cannot be made or written.
    """
    scratch = _scratch(folder / "probe")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(b"\0")
        scratch.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise ResultError(f"cannot write to {folder}: {error.strerror or error}") from error


def _scratch(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


R = TypeVar("R", bound=msgspec.Struct)


class RecordFile(Generic[R]):
    """Files of one kind and version, each the JSON of one record."""

    def __init__(
        self,
        form: type[R],
        kind: str,
        version: int,
        problems: Callable[[R], Iterable[tuple[str, str]]] = lambda _: (),
    ) -> None:
        """
        Args:
            form: of the record.
            kind: what a file says that it is.
            version: the one that this code reads.
            problems: place and fault of every figure that no measurement gives.
        """
        self._form = form
        self._kind = kind
        self._version = version
        self._problems = problems

    def to_json(self, record: R) -> bytes:
        """Indented UTF-8 JSON, the same bytes for the same record."""
        return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"

    def from_json(self, data: bytes, name: str = "result") -> R:
        """The inverse of `to_json`.

        Raises:
            ResultError: not JSON, another kind or version, a field that breaks the schema, or a figure out of its
                range; names `name`.
        """
        try:
            header = msgspec.json.decode(data, type=_Header)
            if header.kind != self._kind:
                raise ResultError(f"{name}: not a {self._kind} file (kind is {header.kind!r})")
            if header.version != self._version:
                raise ResultError(
                    f"{name}: schema version {header.version} is not known (this version reads {self._version})"
                )
            record = msgspec.json.decode(data, type=self._form)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ResultError(f"{name}: {error}") from error
        for place, problem in self._problems(record):
            raise ResultError(f"{name}: {place} {problem}")
        return record

    def save(self, record: R, path: Path) -> None:
        """Write the file whole or not at all.

        Raises:
            ResultError: the folder cannot be written.
        """
        write_whole(path, self.to_json(record))

    def load(self, path: Path) -> R:
        """Read a file.

        Raises:
            ResultError: it cannot be read, or as `from_json`.
        """
        return self.from_json(read_file(path), str(path))


_FILE = RecordFile(Result, KIND, VERSION)
to_json, from_json, save_result, load_result = _FILE.to_json, _FILE.from_json, _FILE.save, _FILE.load
