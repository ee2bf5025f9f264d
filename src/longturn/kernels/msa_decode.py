"""MiniMax Sparse Attention for decode steps: two to four launches, each able to fill the chip with one request.

    scores   blocks of the context are dealt out to programs; also writes the new token's K, V and index key
    select   the best blocks by halving a bound until as many reach it, so no program ever sorts; a graph for short
             contexts leaves this launch out, each program of `attend` then counts the blocks that beat each block
    attend   the chosen tokens are dealt out to `splits` programs a key/value head, each a partial softmax
    merge    one program a query head; none if `splits` is 1

The query's own block is always chosen, so its score is never computed: `scores` reads only whole, older blocks.
Extents come from `positions` on the device (-1 marks a padded row), so that a captured graph serves any lengths up to
the extents it was captured with.
"""

from __future__ import annotations

import triton
from torch import Tensor

from longturn.kernels.dependent import launch_options
from longturn.kernels.kv_formats import NUMBER, lane_views
from longturn.kernels.msa_decode_attend import _attend, _merge
from longturn.kernels.msa_decode_choose import _scores, _select
from longturn.kernels.msa_plan import DecodeRows, MsaNorms, MsaPlan, MsaScratch, MsaShape

_LOG2E = 1.4426950408889634


def msa_decode(
    projected: Tensor, rows: DecodeRows, norms: MsaNorms, cache: Tensor, layer: int, out: Tensor,
    shape: MsaShape, plan: MsaPlan, scratch: MsaScratch, *, pdl: bool = False,
) -> None:  # fmt: skip
    """Sparse attention of one new token a row, into `out` [rows, q_heads * head_dim]; the token's K, V and index key
    are written to its page first.

    projected [rows, shape.projected_width] is the raw q | k | v | index_q | index_k projection; cache is the page-first
    allocation, flat or of any contiguous shape: of one element type (bf16 or fp32), or uint8 where the layout has fp8
    or NVFP4 lanes.
    """
    n = projected.shape[0]
    layout = shape.layout
    heads = {"Q_HEADS": shape.q_heads, "D": layout.head_dim}
    page = {"KV_HEADS": layout.kv_heads, "PAGE": layout.page_tokens, "HALF": shape.rotary_dim // 2}
    more = {"PDL": pdl, **launch_options(pdl)}
    lanes = lane_views(cache, layout, layer)
    kv = (lanes.kv, lanes.kv_stride, lanes.key, lanes.value)
    scales = (lanes.scales, lanes.scale_stride, lanes.key_scale, lanes.value_scale)
    form = NUMBER[layout.kv_format]
    stride = rows.page_table.stride(0)
    single = plan.chunks >= shape.max_blocks
    forced = {"TOP": shape.top_blocks, "INIT": shape.init_blocks, "LOCAL": shape.local_blocks}
    _scores[(plan.chunks + 1, n)](
        projected, rows.positions, rows.page_table, stride, rows.cos, rows.sin,
        norms.index_query, norms.key, norms.index_key, *kv, *scales, lanes.index, lanes.index_stride, lanes.index_key,
        scratch.scores, shape.max_blocks, shape.eps, FORMAT=form, INDEX_FORMAT=NUMBER[layout.index_format],
        CHUNKS=plan.chunks, PAGES=min(32, triton.next_power_of_2(triton.cdiv(shape.max_blocks, plan.chunks))),
        STAGES=plan.score_stages,
        AHEAD=plan.ahead and single,
        num_warps=plan.score_warps, **heads, **page, **more,
    )  # fmt: skip
    fused = shape.max_blocks <= plan.fused_blocks
    if not fused:
        blocks = triton.next_power_of_2(shape.max_blocks)
        _select[(layout.kv_heads, n)](
            rows.positions, rows.page_table, stride, scratch.scores, shape.max_blocks, scratch.selected, scratch.pages,
            KV_HEADS=layout.kv_heads, PAGE=layout.page_tokens, BLOCKS=blocks,
            num_warps=min(16, max(1, blocks // plan.select_blocks)), **forced, **more,
        )  # fmt: skip
    _attend[(plan.splits, layout.kv_heads, n)](
        projected, rows.positions, rows.page_table, stride, rows.cos, rows.sin, norms.query,
        scratch.scores, shape.max_blocks, scratch.selected, scratch.pages, *kv, *scales,
        scratch.partial, scratch.partial_max, scratch.partial_sum, out, layout.head_dim**-0.5 * _LOG2E, shape.eps,
        FORMAT=form, ASM=cache.is_cuda,
        RANKED=triton.next_power_of_2(shape.max_blocks) if fused else 0, SPLITS=plan.splits, TILE=plan.tile,
        STAGES=plan.stages, num_warps=plan.warps, **forced, **heads, **page, **more,
    )  # fmt: skip
    if plan.splits > 1:
        _merge[(shape.q_heads, n)](
            scratch.partial,
            scratch.partial_max,
            scratch.partial_sum,
            out,
            SPLITS=plan.splits,
            num_warps=2,
            **heads,
            **more,
        )
