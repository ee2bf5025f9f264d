"""Pieces of the persistent kernel for one token (one_token.py): grid barriers, weights on their way, products, heads.

A program is 8 warps that compute and one that fetches, and owns a ring of 13 groups of 16 KB in shared memory. A group
is 8 segments of 1,024 weights, one a warp: 4 rows of 2,048, 2 of 4,096, or 16 rows of 512. The copy engine brings a
group as 128 lines of 128 bytes; all weights are addressed as lines of one tensor that spans the device's memory from
the lowest weight on (LINE_WEIGHTS).
"""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.runtime.jit import constexpr_function

PROGRAMS = 128
"""Programs of the kernel, one a multiprocessor: all must be resident at once."""
WARPS = 8
GROUPS = 13
GROUP_BYTES = 16384
LINE_WEIGHTS = 64

_PROGRAMS = gl.constexpr(PROGRAMS)
_BYTES = gl.constexpr(GROUP_BYTES)
# Bits 4 to 6 of an address are xored with bits 7 to 9: the copy engine's 128-byte swizzle, in elements of 2 bytes.
_LINE_BASES = [1, 2, 4, 8, 16, 32, 64 + 8, 128 + 16, 256 + 32, 512]


@constexpr_function
def segments(S):
    """Shared layout of a group as [8 / S rows, S segments, 1,024]."""
    bases = [[0, 0, b] for b in _LINE_BASES]
    bases += [[0, s, 0] for s in (1, 2, 4) if s < S]
    bases += [[r, 0, 0] for r in (1, 2, 4) if r < 8 // S]
    return gl.SharedLinearLayout(bases)


@constexpr_function
def short_rows():
    """Shared layout of a group as [16 rows, 512]."""
    return gl.SharedLinearLayout([[0, b] for b in _LINE_BASES[:-1]] + [[r, 0] for r in (1, 2, 4, 8)])


@constexpr_function
def warp_segments(S):
    """Registers of a group as [8 / S, S, 1,024]: a warp holds its segment, 8 neighbours a lane, without conflicts."""
    return gl.BlockedLayout([1, 1, 8], [1, 1, 32], [8 // S, S, 1], [2, 1, 0])


@constexpr_function
def flat_shared(rank):
    return gl.SwizzledSharedLayout(1, 1, 1, list(range(rank - 1, -1, -1)))


@gluon.jit
def arrive(counter):
    """Tell all programs that this one's stores so far are done. A later `wait` of theirs makes them visible."""
    gl.thread_barrier()
    gl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .u32 t;
        mov.u32 t, %tid.x;
        setp.eq.u32 p, t, 0;
        @p red.release.gpu.global.add.u32 [$1], 1;
        mov.u32 $0, 0;
        }""",
        "=r,l", [counter.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait(counter, target):
    """Wait until `counter` has reached `target`. One thread polls: more of them slow the counter down. After some
    seconds, which only a fault can take, it traps: an error is better than a device that hangs."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .u32 t, v, n;
        mov.u32 t, %tid.x;
        mov.u32 n, 0;
        setp.ne.u32 p, t, 0;
        @p bra DONE;
        POLL:
        ld.acquire.gpu.global.u32 v, [$1];
        setp.ge.u32 p, v, $2;
        @p bra DONE;
        add.u32 n, n, 1;
        setp.lt.u32 p, n, 0x1000000;
        @p bra POLL;
        trap;
        DONE:
        mov.u32 $0, 0;
        }""",
        "=r,l,r", [counter.to(gl.int64), target], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    gl.thread_barrier()


@gluon.jit
def cycles():
    """This multiprocessor's clock."""
    return gl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def prefetch(address, ok):
    """Bring the lines at `address` (int64 tensor) to L2."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r", [address, ok.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_alone(counter, target):
    """`wait` of a partition of one warp."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .u32 v, n;
        mov.u32 n, 0;
        POLL:
        ld.acquire.gpu.global.u32 v, [$1];
        setp.ge.u32 p, v, $2;
        @p bra DONE;
        add.u32 n, n, 1;
        setp.lt.u32 p, n, 0x1000000;
        @p bra POLL;
        trap;
        DONE:
        mov.u32 $0, 0;
        }""",
        "=r,l,r", [counter.to(gl.int64), target], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    gl.thread_barrier()


@gluon.jit
def fetch(lines, line, ring, group: gl.constexpr, bar):
    """Start one group on its way; `bar` completes when it is there."""
    mbarrier.expect(bar, _BYTES)
    tma.async_copy_global_to_shared(lines, [line, 0], bar, ring.index(group))


@gluon.jit
def group_parts(group, x, S: gl.constexpr):
    """Each lane's part of the group's segments times x fp32 [S, 1024] (slice of `warp_segments`): [8 / S, S, 32]."""
    w = group._reinterpret(gl.bfloat16, [8 // S, S, 1024], segments(S)).load(warp_segments(S))
    product = w.to(gl.float32) * x[None, :, :]
    return gl.sum(gl.sum(product.reshape([8 // S, S, 4, 32, 8]), axis=4), axis=2)


def _lanes_asm(count: int) -> str:
    """PTX that adds up `count` registers over a warp's lanes: lane l is left with the sum of register l % count.

    A lane and its partner each give away half of their registers, so that there are `count` shuffles or a few more,
    not five times as many.
    """
    lines = [".reg .pred p; .reg .u32 l; .reg .f32 s, k;", "mov.u32 l, %laneid;"]
    lines += [f".reg .f32 v{i};\nmov.f32 v{i}, ${i + 1};" for i in range(count)]
    left, bit = count, 1
    while left > 1:
        lines.append(f"and.b32 l, l, 31; {{ .reg .u32 b; and.b32 b, l, {bit}; setp.ne.u32 p, b, 0; }}")
        for i in range(left // 2):
            low, high = f"v{2 * i}", f"v{2 * i + 1}"
            lines.append(f"selp.f32 s, {low}, {high}, p; selp.f32 k, {high}, {low}, p;")
            lines.append(f"shfl.sync.bfly.b32 s, s, {bit}, 0x1f, 0xffffffff; add.f32 v{i}, k, s;")
        left, bit = left // 2, bit * 2
    while bit < 32:
        lines.append(f"shfl.sync.bfly.b32 s, v0, {bit}, 0x1f, 0xffffffff; add.f32 v0, v0, s;")
        bit *= 2
    return "{\n" + "\n".join([*lines, "mov.f32 $0, v0;"]) + "\n}"


_LANES_8 = gl.constexpr(_lanes_asm(8))
_LANES_16 = gl.constexpr(_lanes_asm(16))
_OPERANDS_8 = gl.constexpr(",".join(["=f"] + ["f"] * 8))
_OPERANDS_16 = gl.constexpr(",".join(["=f"] + ["f"] * 16))


@gluon.jit
def over_lanes_8(a, b, c, d, e, f, g, h):
    """Sums of eight tensors over their last axis, the lanes: element l of that axis is the sum of tensor l % 8."""
    return gl.inline_asm_elementwise(
        _LANES_8, _OPERANDS_8, [a, b, c, d, e, f, g, h], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def over_lanes_16(a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q):
    """`over_lanes_8` of sixteen."""
    return gl.inline_asm_elementwise(
        _LANES_16, _OPERANDS_16, [a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q], dtype=gl.float32, is_pure=True,
        pack=1,
    )  # fmt: skip


@gluon.jit
def rows_of(sums, y, FROM: gl.constexpr, COUNT: gl.constexpr, S: gl.constexpr):
    """Sums of whole rows from y of `over_lanes_8` or `_16`, through shared memory: fp32 [8 / S, COUNT], element (r, g)
    of row r of group FROM + g, in a slice of `across(S)`."""
    view = sums._reinterpret(gl.float32, [8 // S, S, 32], flat_shared(3))
    if FROM == 0:
        view.store(y)
        gl.thread_barrier()
    return gl.sum(view.slice(FROM, COUNT, 2).load(across(S)), axis=1)


@constexpr_function
def across(S):
    return gl.BlockedLayout([1, S, 1], [1, 1, 32], [8, 1, 1], [1, 2, 0])


@constexpr_function
def head_rows():
    """Registers of heads [R, 128]: a row a warp."""
    return gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0])


@constexpr_function
def _gains_form():
    return gl.BlockedLayout([1, 2], [1, 32], [4, 2], [1, 0])


@gluon.jit
def _partner(d, HALF: gl.constexpr):
    """The column that column d is rotated with."""
    return gl.where(d < HALF, d + HALF, gl.where(d < 2 * HALF, d - HALF, d))


@gluon.jit
def head_gains(norms, HALF: gl.constexpr):
    """Norm weights of a layer's four kinds of heads, query, key, index query and index key, from a pointer to
    [4, 128]; and the same of each column's partner. Both bf16 [4, 128]."""
    form: gl.constexpr = _gains_form()
    at = norms + gl.arange(0, 4, gl.SliceLayout(1, form))[:, None] * 128
    d = gl.arange(0, 128, gl.SliceLayout(0, form))
    return gl.load(at + d[None, :]), gl.load(at + _partner(d, HALF)[None, :])


@gluon.jit
def keep_gains(gains, own, partner):
    """Into shared memory [2, 4, 128], where `norm_rope` finds them. Read from global memory by every warp of every
    program, such lines keep L2 busy for microseconds (and no L1 holds them over a grid barrier)."""
    gains._reinterpret(gl.bfloat16, [2, 4, 128], flat_shared(2)).index(0).store(own)
    gains._reinterpret(gl.bfloat16, [2, 4, 128], flat_shared(2)).index(1).store(partner)


@gluon.jit
def keep_turns(turns, cos, sin, R: gl.constexpr):
    """Cosines and sines of R rows, fp32 [R, 128] each, into shared memory [2, R, 128]."""
    form: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 2], [1, 0])
    at = gl.arange(0, R, gl.SliceLayout(1, form))[:, None] * 128 + gl.arange(0, 128, gl.SliceLayout(0, form))[None, :]
    view = turns._reinterpret(gl.float32, [2, R, 128], flat_shared(2))
    view.index(0).store(gl.load(cos + at, cache_modifier=".cg"))
    view.index(1).store(gl.load(sin + at, cache_modifier=".cg"))


@gluon.jit
def norm_rope(
    heads_at, gains, kind, turns, row, eps, R: gl.constexpr, COUNT: gl.constexpr, HALF: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """COUNT heads of 128 from pointer `heads_at` on, normalised and rotated, fp32 [R, 128] with zeros below them; as
    `head_norm.norm_rope_heads`. `kind` of heads as `head_gains` lists them; `row` of ROWS, as `keep_turns` was given
    them."""
    form: gl.constexpr = head_rows()
    r = gl.arange(0, R, gl.SliceLayout(1, form))
    d = gl.arange(0, 128, gl.SliceLayout(0, form))
    ok = (r < COUNT)[:, None]
    at = heads_at + r[:, None] * 128
    x = gl.load(at + d[None, :], mask=ok, other=0.0, cache_modifier=".cg")
    y = gl.load(at + _partner(d, HALF)[None, :], mask=ok, other=0.0, cache_modifier=".cg")
    return turned(x, y, gains, kind, turns, row, eps, ROWS)


@gluon.jit
def turned(x, y, gains, kind, turns, row, eps, ROWS: gl.constexpr):
    """Heads x fp32 [R, 128] in `head_rows`, and y, each column's partner, normalised and rotated."""
    lane: gl.constexpr = gl.SliceLayout(0, head_rows())
    held = gains._reinterpret(gl.bfloat16, [8, 128], flat_shared(1))
    w = held.index(kind).load(lane).to(gl.float32) + 1.0
    w_partner = held.index(4 + kind).load(lane).to(gl.float32) + 1.0
    angle = turns._reinterpret(gl.float32, [2 * ROWS, 128], flat_shared(1))
    scale = gl.rsqrt(gl.sum(x * x, axis=1) / 128 + eps)[:, None]
    x = x * scale * w[None, :]
    y = y * scale * w_partner[None, :]
    return x * angle.index(row).load(lane)[None, :] + y * angle.index(ROWS + row).load(lane)[None, :]


@gluon.jit
def fresh(pointer):
    """The same pointer, of which the compiler knows nothing: addresses that hang on it are computed where they are
    used. Those that it would compute before a loop over layers are more than there are registers for, and what it puts
    into local memory comes back from L2, since a grid barrier empties L1."""
    address = gl.inline_asm_elementwise(
        "mov.u64 $0, $1;", "=l,l", [pointer.to(gl.int64)], dtype=gl.int64, is_pure=False, pack=1
    )
    return gl.multiple_of(address.to(pointer.dtype), 16)
