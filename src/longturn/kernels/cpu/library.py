"""The compiled library: its C structs, and the single operations that tests and benchmarks call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longturn.config import PAGE_TOKENS
from longturn.errors import ConfigError, LongturnError
from longturn.kernels.cpu.build import KernelBuildError, build
from longturn.kernels.cpu.packing import PackedMatrix

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
CacheArray = npt.NDArray[Any]
"""Keys and values of all pages: float16 or float32 [pages, layers, 2, kv_heads, 128 * head_dim], C order.

[.., 0, h, :] holds keys as [8 tiles][head_dim][16 tokens], [.., 1, h, :] values as [128 tokens][head_dim].
A page is one contiguous range of bytes.
"""

_KINDS = {"q4_1": 0, "q8_0": 1}


class MatrixStruct(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("cols", ctypes.c_int32),
    ]


MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
VECTORS = ("attention_norm", "mlp_norm", "q_bias", "k_bias", "v_bias", "o_bias", "q_norm", "k_norm")


class LayerStruct(ctypes.Structure):
    _fields_ = [*((n, MatrixStruct) for n in MATRICES), *((n, ctypes.c_void_p) for n in VECTORS)]


class ModelStruct(ctypes.Structure):
    _fields_ = [
        *(
            (n, ctypes.c_int32)
            for n in (
                *("layers", "hidden", "heads", "kv_heads", "head_dim", "rotary_dim", "ffn", "vocab"),
                *("positions", "half_cache", "threads", "use_amx"),
            )
        ),
        ("eps", ctypes.c_float),
        ("attention_scale", ctypes.c_float),
        ("embedding", MatrixStruct),
        ("head", MatrixStruct),
        *((n, ctypes.c_void_p) for n in ("final_norm", "cosine", "sine", "layer")),
    ]


class StepStruct(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_int32) for n in ("tokens", "rows", "max_pages", "pages", "outputs")),
        *(
            (n, ctypes.c_void_p)
            for n in ("token", "position", "row", "page_table", "output", "cache", "logits", "argmax")
        ),
    ]


class NativeLibrary:
    """A loaded library. `load` makes the one for this machine."""

    def __init__(self, path: Path) -> None:
        try:
            self._dll = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelBuildError(f"compiled CPU kernels do not load: {error}") from error
        self.path = path
        dll = self._dll
        dll.lt_isa.restype = ctypes.c_char_p
        dll.lt_amx.restype = ctypes.c_int32
        dll.lt_decoder_create.restype = ctypes.c_void_p
        dll.lt_decoder_create.argtypes = [ctypes.POINTER(ModelStruct)]
        dll.lt_decoder_destroy.restype = None
        dll.lt_decoder_destroy.argtypes = [ctypes.c_void_p]
        dll.lt_decoder_forward.restype = ctypes.c_int64
        dll.lt_decoder_forward.argtypes = [ctypes.c_void_p, ctypes.POINTER(StepStruct)]
        i32, pointer = ctypes.c_int32, ctypes.c_void_p
        dll.lt_linear.restype = i32
        dll.lt_linear.argtypes = [ctypes.POINTER(MatrixStruct), pointer, i32, pointer, i32, i32]
        dll.lt_dequantise.restype = None
        dll.lt_dequantise.argtypes = [ctypes.POINTER(MatrixStruct), i32, pointer]
        dll.lt_attention.restype = i32
        dll.lt_attention.argtypes = [
            *(pointer, i32, i32, i32, i32, i32, pointer, pointer, i32, i32, i32, ctypes.c_float, i32, pointer)
        ]
        dll.lt_write_kv.restype = None
        dll.lt_write_kv.argtypes = [pointer, i32, i32, i32, i32, i32, pointer, pointer, pointer, i32, i32]

    @property
    def dll(self) -> ctypes.CDLL:
        return self._dll

    @property
    def isa(self) -> str:
        """`avx512-vnni`, `avx2` or `generic`."""
        name: bytes = self._dll.lt_isa()
        return name.decode()

    @property
    def amx(self) -> bool:
        """AMX was compiled in and the system lets this process use it."""
        return bool(self._dll.lt_amx())

    def linear_q(self, x: Float32, matrix: PackedMatrix, *, threads: int = 1, use_amx: bool = True) -> Float32:
        """x [tokens, cols] times a packed matrix, activations quantised to 12-bit blocks: float32 [tokens, rows]."""
        expect("x", x, np.float32, (x.shape[0], matrix.cols))
        out = np.empty((x.shape[0], matrix.rows), np.float32)
        packed = matrix_struct(matrix)
        done = self._dll.lt_linear(ctypes.byref(packed), address(x), x.shape[0], address(out), threads, int(use_amx))
        if done != 0:
            raise LongturnError("out of memory in a CPU kernel")
        return out

    def dequantise_row(self, matrix: PackedMatrix, row: int) -> Float32:
        """One row as float32 [cols]."""
        if not 0 <= row < matrix.rows:
            raise ConfigError(f"row {row} of a matrix of {matrix.rows} rows")
        out = np.empty(matrix.cols, np.float32)
        packed = matrix_struct(matrix)
        self._dll.lt_dequantise(ctypes.byref(packed), row, address(out))
        return out

    def write_kv(
        self, cache: CacheArray, layer: int, pages: Int32, k: Float32, v: Float32, *, first_position: int
    ) -> None:
        """Write keys and values, each [tokens, kv_heads, head_dim], of one row from `first_position` on."""
        layers, kv_heads, dim = _cache_shape(cache)
        expect("k", k, np.float32, (k.shape[0], kv_heads, dim))
        expect("v", v, np.float32, k.shape)
        _check_row(cache, layer, pages, first_position + k.shape[0])
        half = int(cache.dtype == np.float16)
        self._dll.lt_write_kv(
            address(cache),
            half,
            layers,
            kv_heads,
            dim,
            layer,
            address(pages),
            address(k),
            address(v),
            k.shape[0],
            first_position,
        )

    def paged_attention(
        self,
        cache: CacheArray,
        layer: int,
        pages: Int32,
        q: Float32,
        *,
        first_position: int,
        scale: float,
        split: bool = False,
    ) -> Float32:
        """Causal attention of one row's queries [tokens, heads, head_dim], whose keys the cache holds already.

        `split` computes every page apart and merges, as decodes are spread over threads; the bits are the same.
        """
        layers, kv_heads, dim = _cache_shape(cache)
        tokens, heads = q.shape[0], q.shape[1]
        expect("q", q, np.float32, (tokens, heads, dim))
        if heads % kv_heads != 0:
            raise ConfigError(f"{heads} query heads cannot share {kv_heads} KV heads")
        _check_row(cache, layer, pages, first_position + tokens)
        out = np.empty_like(q)
        done = self._dll.lt_attention(
            *(address(cache), int(cache.dtype == np.float16), layers, kv_heads, dim, layer, address(pages), address(q)),
            *(tokens, heads, first_position, scale, int(split), address(out)),
        )
        if done != 0:
            raise LongturnError("out of memory in a CPU kernel")
        return out


def load(cache_dir: Path | None = None) -> NativeLibrary:
    """The library for this machine, compiled on first use.

    Raises:
        KernelBuildError: it cannot be compiled or loaded; the message says why.
    """
    path = build(cache_dir)
    try:
        return _load(path)
    except KernelBuildError as error:
        # It was whole when it was written: somebody or a full disk has cut it since.
        try:
            path.unlink(missing_ok=True)
        except OSError:
            raise error from None
        return _load(build(cache_dir))


@functools.cache
def _load(path: Path) -> NativeLibrary:
    return NativeLibrary(path)


def unavailable_reason(cache_dir: Path | None = None) -> str | None:
    """None if the kernels compile and load here, else one line that says why not; for choosing another path."""
    try:
        load(cache_dir)
    except KernelBuildError as error:
        return str(error)
    return None


def address(array: npt.NDArray[Any]) -> int:
    return array.ctypes.data


def matrix_struct(m: PackedMatrix) -> MatrixStruct:
    return MatrixStruct(address(m.data), _KINDS[m.kind], m.rows, m.cols)


def expect(name: str, array: npt.NDArray[Any], dtype: Any, shape: Sequence[int]) -> None:
    if array.dtype != dtype or array.shape != tuple(shape) or not array.flags.c_contiguous:
        raise ConfigError(
            f"'{name}' must be contiguous {np.dtype(dtype).name} {tuple(shape)}, not {array.dtype} {array.shape}"
        )


def _cache_shape(cache: CacheArray) -> tuple[int, int, int]:
    if cache.ndim != 5 or cache.dtype not in (np.float16, np.float32) or not cache.flags.c_contiguous:
        raise ConfigError(f"'cache' must be fp16 or fp32 with five axes, not {cache.dtype} {cache.shape}")
    return cache.shape[1], cache.shape[3], cache.shape[4] // PAGE_TOKENS


def _check_row(cache: CacheArray, layer: int, pages: Int32, tokens: int) -> None:
    need = -(-tokens // PAGE_TOKENS)
    expect("pages", pages, np.int32, (pages.shape[0],))
    if not 0 <= layer < cache.shape[1]:
        raise ConfigError(f"layer {layer} of {cache.shape[1]}")
    if need > pages.shape[0] or int(pages[:need].min()) < 0 or int(pages[:need].max()) >= cache.shape[0]:
        raise ConfigError(f"'pages' must hold {need} page ids below {cache.shape[0]}")
