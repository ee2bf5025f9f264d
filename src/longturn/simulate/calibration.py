"""Kernel-level constants of one kernel family on one platform, with how well they fit what they were fitted to.

A constant that says how fast a kernel streams or computes is a fraction of the platform's peak, so that it can be read
beside the specification and, where a platform has no table of its own, borrowed from a relative: `basis` says which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from longturn.config import Range, config_from_dict
from longturn.errors import ConfigError

Basis = Literal["tables", "measured", "published", "borrowed", "assumed"]
"""tables: fitted on measured kernel tables. measured: fitted on whole steps that were measured. published: fitted on
part of a published table. borrowed: another platform's fractions. assumed: nothing was measured."""

Fraction = Annotated[float, Range(0, 8)]
"""Of a peak. Over 1 where the kernel uses a faster format than the peak it is counted against."""
Nanoseconds = Annotated[float, Range(0)]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Residual:
    """How far a fit is from its points: relative, so 0.05 is 5 percent."""

    rms: Annotated[float, Range(0)]
    worst: Annotated[float, Range(0)]
    points: Annotated[int, Range(0)]


@dataclass(frozen=True, slots=True)
class AttentionConstants:
    """A block-sparse attention layer: projections, index scan, selection, attention over the chosen blocks."""

    basis: Basis
    note: str
    decode_fixed_ns: Nanoseconds
    """Launches, norms, rotation, cache write and the selection's latency of a layer in a step without chunks."""
    prefill_fixed_ns: Nanoseconds
    """The same in a step with chunks."""
    weight_stream: Fraction
    """Of memory bandwidth, reading projection weights."""
    compute: Fraction
    """Of the weight format's peak, in the projections."""
    index_stream: Fraction
    """Of memory bandwidth, reading index keys for decode rows."""
    index_compute: Fraction
    """Of the BF16 peak, scoring index keys for chunks."""
    attend_stream: Fraction
    """Of memory bandwidth, reading the chosen keys and values for decode rows."""
    attend_compute: Fraction
    """Of the BF16 peak, attending over the chosen blocks for chunks."""
    decode_token_ns: Nanoseconds
    """Per layer and decode token, beside all that scales with bytes."""
    prefill_token_ns: Nanoseconds
    """Per layer and token of a chunk, likewise."""
    decode: Residual
    prefill: Residual
    # What follows is 0 where no table shows it.
    select_ns: Nanoseconds = 0.0
    """Choosing blocks for chunks: per layer, token, index head and block that there is to choose among."""
    chunk_stream: Annotated[float, Range(0, 8)] = 0.0
    """Of memory bandwidth, reading the blocks that a chunk's tokens choose, each once, before or after computing with
    them. At 0 the time is the longer of the two, and blocks stream as for decode rows."""
    part_bytes: Annotated[float, Range(0)] = 0.0
    """Bytes moved at the peak per token of a chunk, chosen block and element of a head: what each block gave is
    written, read again and combined."""
    tile_tokens: Annotated[int, Range(0)] = 0
    """Tokens of a tile in which chunks are scored, filled or not. Decode rows beside chunks then go through the kernels
    for chunks too, each in a tile of its own. At 0 they have kernels of their own, and tiles are not counted."""
    row_tile_tokens: Annotated[int, Range(0)] = 0
    """Tokens whose share of a full tile takes as long as the tile of a decode row of one token; 0: as a full one."""
    lone_hidden: Annotated[int, Range(0)] = 0
    """Widest hidden size whose step of few rows and no chunk is one launch for all layers. It has the two constants
    below in place of `decode_fixed_ns` and `index_stream`; 0: there is no such kernel."""
    lone_rows: Annotated[int, Range(1)] = 1
    """Most rows, of one token each, of that launch."""
    lone_fixed_ns: Nanoseconds = 0.0
    lone_index_stream: Fraction = 1.0
    few_fixed_ns: Nanoseconds = 0.0
    """These two are for more rows than one, which that launch takes through further phases."""
    few_index_stream: Fraction = 1.0


@dataclass(frozen=True, slots=True)
class ExpertConstants:
    """The routed experts of one layer: both matrices, permutation and weighted sum included, router excluded."""

    basis: Basis
    note: str
    rate: Literal["bf16", "fp8", "nvfp4"]
    """Whose peak `compute` is a fraction of."""
    fixed_ns: Nanoseconds
    stream: Fraction
    """Of memory bandwidth, for experts that take 0.1 ms at that bandwidth."""
    stream_exponent: Annotated[float, Range(0, 2)]
    """Time grows with bytes to this power: few experts do not fill the memory system. 1 is proportional."""
    compute: Fraction
    activation_bytes: Annotated[float, Range(0)]
    """Bytes moved per token, chosen expert and hidden element, at the peak: quantise, permute, weighted sum."""
    sharpness: Annotated[float, Range(1)]
    """How well streaming and computing overlap: 1 adds the two times, infinity takes the longer one."""
    uneven: Annotated[float, Range(0)]
    """Share by which computing takes longer where experts get unequally many tokens: tiles are padded and some end
    late. For a spread of popularity of 20; in proportion to its logarithm for others."""
    tables: Residual
    """Rows with balanced routing, which the constants above but `uneven` were fitted to."""
    uneven_tables: Residual
    """Rows with power-law routing (exponent 1.01)."""


@dataclass(frozen=True, slots=True)
class Knots:
    """Time of a collective at some message sizes, of which the time between is interpolated."""

    bytes: tuple[Annotated[int, Range(1)], ...]
    ns: tuple[Nanoseconds, ...]


@dataclass(frozen=True, slots=True)
class CollectiveConstants:
    basis: Basis
    note: str
    link_bytes_s: Annotated[float, Range(1)]
    """Link bandwidth, one direction, of the platform that was measured; what exceeds the smallest message's time is
    scaled by it."""
    ranks: Mapping[int, Knots]


@dataclass(frozen=True, slots=True)
class KernelFamily:
    """One engine's kernels on one platform. The same silicon differs several times between families."""

    name: str
    source: str
    date: str
    small_kernel_ns: float
    """A kernel of a captured graph that moves little: a norm, an activation, a router."""
    gemm_note: str
    attention: Mapping[str, AttentionConstants]
    """By "<projection weights>-<cache>", such as `fp8-bf16`."""
    experts: Mapping[str, ExpertConstants]
    """By weight format; `<format>-localized` has weights placed by locality domain."""
    all_reduce: CollectiveConstants
    all_to_all: CollectiveConstants
    chunk_sizes: tuple[int, ...] = ()
    """Token counts, ascending, that steps with chunks are padded to, each a captured graph; if none, as the run's
    options say."""


_DIVISORS = (
    "weight_stream", "compute", "index_stream", "index_compute", "attend_stream", "attend_compute", "stream",
    "stream_exponent",
)  # fmt: skip
_FAMILY_KEYS = ("source", "date", "small_kernel_ns", "gemm_note", "attention", "experts", "all_reduce", "all_to_all")


def read_family(data: Mapping[str, Any], name: str, where: str) -> KernelFamily:
    """One family from its part of a platform file.

    Raises:
        ConfigError: a key is unknown or missing or a value impossible; the line starts with `where` and names the key.
    """
    check_keys(data, (*_FAMILY_KEYS, "chunk_sizes"), _FAMILY_KEYS, where)
    sizes = data.get("chunk_sizes", [])
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigError(f"{where}.chunk_sizes must be a list of whole numbers above 0, not {sizes!r}")
    if sorted(set(sizes)) != sizes:
        raise ConfigError(f"{where}.chunk_sizes must be ascending")
    small = data["small_kernel_ns"]
    if isinstance(small, bool) or not isinstance(small, (int, float)) or small < 0:
        raise ConfigError(f"{where}.small_kernel_ns must be a number of nanoseconds, not {small!r}")
    return KernelFamily(
        name=name,
        source=_text(data, "source", where),
        date=_text(data, "date", where),
        small_kernel_ns=float(small),
        gemm_note=_text(data, "gemm_note", where),
        attention=_table(AttentionConstants, data["attention"], f"{where}.attention"),
        experts=_table(ExpertConstants, data["experts"], f"{where}.experts"),
        all_reduce=_collective(data["all_reduce"], f"{where}.all_reduce"),
        all_to_all=_collective(data["all_to_all"], f"{where}.all_to_all"),
        chunk_sizes=tuple(sizes),
    )


def check_keys(data: Any, known: tuple[str, ...], needed: tuple[str, ...], where: str) -> None:
    """Raises ConfigError if `data` is no mapping, has a key beside `known`, or lacks one of `needed`."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} must be a table, not {data!r}")
    for key in data:
        if key not in known:
            raise ConfigError(f"{where}: unknown key '{key}' (known: {', '.join(sorted(known))})")
    for key in needed:
        if key not in data:
            raise ConfigError(f"{where}: missing '{key}'")


def read_record(cls: type[_T], data: Any, where: str) -> _T:
    """A flat dataclass, or one of dataclasses, from a table; all of its fields without a default must be there."""
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    needed = tuple(f.name for f in fields if f.default is dataclasses.MISSING)
    check_keys(data, tuple(f.name for f in fields), needed, where)
    for field in fields:
        inner = data.get(field.name)
        record = _RECORDS.get(str(field.type))
        if record is not None and field.name in data:
            check_keys(inner, *_names(record), f"{where}.{field.name}")
    try:
        return config_from_dict(cls, data)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _names(cls: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names = tuple(f.name for f in dataclasses.fields(cls))
    return names, names


_RECORDS: Mapping[str, type] = MappingProxyType({"Residual": Residual})


def _text(data: Mapping[str, Any], key: str, where: str) -> str:
    value = data[key]
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where}.{key} must be a text that is not empty, not {value!r}")
    return value


def _table(cls: type[_T], data: Any, where: str) -> Mapping[str, _T]:
    if not isinstance(data, Mapping) or not data:
        raise ConfigError(f"{where} must be a table with at least one entry")
    records = {key: read_record(cls, value, f"{where}.{key}") for key, value in data.items()}
    for key, record in records.items():
        for name in _DIVISORS:
            if getattr(record, name, 1.0) <= 0.0:
                raise ConfigError(f"{where}.{key}: {name} must be above 0")
    return MappingProxyType(records)


def _collective(data: Any, where: str) -> CollectiveConstants:
    known = ("basis", "note", "link_bytes_s", "ranks")
    check_keys(data, known, known, where)
    ranks: dict[int, Knots] = {}
    if not isinstance(data["ranks"], Mapping) or not data["ranks"]:
        raise ConfigError(f"{where}.ranks must be a table with at least one entry")
    for key, value in data["ranks"].items():
        knots = read_record(Knots, value, f"{where}.ranks.{key}")
        if not key.isdigit() or int(key) < 2:
            raise ConfigError(f"{where}.ranks: '{key}' is not a number of ranks of at least 2")
        if len(knots.bytes) != len(knots.ns) or len(knots.bytes) < 2 or sorted(set(knots.bytes)) != list(knots.bytes):
            raise ConfigError(f"{where}.ranks.{key}: needs at least 2 ascending sizes, and a time for each")
        ranks[int(key)] = knots
    flat = {key: value for key, value in data.items() if key != "ranks"}
    checked = read_record(_CollectiveHead, flat, where)
    return CollectiveConstants(checked.basis, checked.note, checked.link_bytes_s, MappingProxyType(ranks))


@dataclass(frozen=True, slots=True)
class _CollectiveHead:
    basis: Basis
    note: str
    link_bytes_s: Annotated[float, Range(1)]
