"""Sampling on the device in two launches: the rows of a step may be greedy, sampled, or ask for anything else.

    parts    a row's vocabulary is dealt out to programs; each applies penalties, bias, bans and grammar, and keeps its
             best token (of the logits, or of the exponential race) and, for rows that truncate, its likeliest tokens
    finish   one program a row: the best of the parts' best; or, for rows that truncate, the threshold of top-k and
             top-p by bisection and the race among the survivors

Semantics and random numbers are those of executor/sampler.py, in fp32: results can differ only at near ties. The race
is decided in the log domain: token i's score is logit_i / T - log(e_i), where e_i is exponentially distributed and
hashed from (seed, position, i).

Top-k and top-p need no sort. The tokens of a row are compared by an integer key of their logit; bisection finds the
largest interval of keys above which tokens are too few, or too light, and the interval's own tokens come in order of
their ids. Usually the parts' likeliest tokens are enough, and the search stays in registers. Where they are not (a flat
distribution), the row's program runs the race among all tokens and tries the winner first: if it is one of those that
truncation leaves, which one more pass over the row tells, it is the winner among those too. If not, the next ones are
tried; and if none of them is left, every round of the search is a pass over the row.
"""

from __future__ import annotations

from torch import Tensor

from longturn.kernels.dependent import launch_options
from longturn.kernels.sampling_finish import finish_rows
from longturn.kernels.sampling_parts import sample_parts
from longturn.kernels.sampling_table import Sampled, SamplePlan, SampleScratch, SamplingTable


def sample_rows(
    logits: Tensor, rows: Tensor, positions: Tensor, table: SamplingTable, scratch: SampleScratch, out: Sampled,
    *, plan: SamplePlan, last_tokens: Tensor | None = None, bitmask: Tensor | None = None, full: bool = True,
    pdl: bool = False,
) -> None:  # fmt: skip
    """Sample one token for each row of `logits` into `out`, and count it in the row's penalty slot.

    Args:
        logits: fp32 [S, vocab], raw; not modified.
        rows: int32 [S]: row of `table` that the logits belong to; -1 marks padding, for which nothing is written.
        positions: int32 [S]: index in its sequence of the token to be sampled (the logits' own position + 1).
        table: sampling state by row. `executor.sampling_words` fills it from sampling parameters.
        scratch: for at least S samples, with the same plan.
        out: results; memory of the host that the device can reach will do.
        plan: how the vocabulary is dealt out; `SamplePlan.default(S)`.
        last_tokens: int32 [rows]: token that the row's next step takes, written at the table's row: the sampled one, 0
            where there is none, so that it is always a token that exists.
        bitmask: int32 [S, ceil(vocab / 32)]: bit i % 32 of word i // 32 is set where token i is allowed; None: all.
        full: False leaves out all but greedy choice and temperature, for a graph whose rows ask for nothing else
            (`executor.sampling_words.plain`): several times faster at many rows.
        pdl: launch dependently, see dependent.py.
    """
    samples, vocab = logits.shape
    if bitmask is not None and not full:
        raise ValueError("a grammar's bitmask needs full sampling")
    more = {"FULL": full, "PARTS": plan.parts, "WIDTH": plan.width, "PDL": pdl, **launch_options(pdl)}
    buffers = (
        scratch.floats, scratch.indices, scratch.values, scratch.ids, scratch.adjusted, scratch.top_values,
        scratch.top_ids,
    )  # fmt: skip
    sample_parts[(plan.parts, samples)](
        logits, rows, positions, table.params, table.stop_ids, table.bias_ids, table.bias_values, table.penalties,
        logits if bitmask is None else bitmask, vocab, -(-vocab // 32), *buffers,
        TILE=plan.tile(vocab), MASKED=bitmask is not None, num_warps=plan.warps, **more,
    )  # fmt: skip
    finish_rows[(samples,)](
        logits, rows, positions, table.params, table.penalties, vocab, *buffers, out.tokens,
        out.tokens if last_tokens is None else last_tokens, out.logprobs, out.top_ids, out.top_logprobs,
        out.tokens if out.turn is None else out.turn, out.turn_words, TURNS=out.turn is not None, BLOCK=plan.block,
        FEEDS=last_tokens is not None, num_warps=plan.finish_warps, **more,
    )  # fmt: skip
