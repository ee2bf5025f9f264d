"""Sessions like those of a corpus that is only described: joined, given subagents and stretched until they match.

Every number comes from the description. Blocks are stretched by what the prompts of subagents need, since stretched
blocks make the new part of every prompt longer too; prompts of root agents get their length from sessions that go on.
"""

from __future__ import annotations

import itertools
import math
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longturn.bench.hit_rate import prompt_hits
from longturn.bench.traces.lengthen import lengthened
from longturn.bench.traces.pauses import with_pauses
from longturn.bench.traces.shrink import drop_long
from longturn.bench.traces.subagents import finer, of_subagent, recorded_groups, with_subagents
from longturn.bench.traces.tree import SessionTree, TraceRequest
from longturn.errors import ConfigError
from longturn.simulate.workload import Stretch, stretched_by

_FILE = Path(__file__).parent / "corpora.toml"
_CLOSE = 0.02
"""The mean prompt is met to this; sessions end where they end."""
_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Corpus:
    """What is known of one; keys are those of `corpora.toml`."""

    name: str
    title: str
    source: str
    wanted: Mapping[str, float]
    described: Mapping[str, float]


def corpora() -> Mapping[str, Corpus]:
    """All that are known, by name."""
    data = tomllib.loads(_FILE.read_text())
    return {
        name: Corpus(name, entry["title"], f"{entry['source']}, {entry['date']}", entry["wanted"], entry["described"])
        for name, entry in data.items()
    }


def corpus_named(name: str) -> Corpus:
    """Raises ConfigError if there is no such corpus."""
    found = corpora()
    if name not in found:
        raise ConfigError(f"--like: unknown '{name}' (known: {', '.join(found)})")
    return found[name]


def made_like(trees: Sequence[SessionTree], corpus: Corpus, seed: int) -> tuple[list[SessionTree], Stretch, int]:
    """Sessions like those of a corpus, of recorded ones.

    Args:
        trees: at least one; some of them with subagents, unless the corpus has none.
        corpus: see there.
        seed: of what is joined with what, and which sessions get which subagents.

    Returns:
        The sessions, by how much blocks and answers of root agents were stretched, and how many requests were left
        out, as they had become longer than the corpus has them.

    Raises:
        ConfigError: no subagents to give.
    """
    wanted = corpus.wanted
    groups = finer(recorded_groups(trees), wanted["subagent_requests"])
    trees = with_pauses(trees, wanted["pause_median"], wanted["pause_p90"])
    turns = statistics.mean(len(tree.root.requests) for tree in trees)
    by, nearest, made = 1.0, float("inf"), list(trees)
    for _ in range(_ROUNDS):
        longer = lengthened(trees, turns, round(wanted["most_context"] / by), seed)
        found = with_subagents(longer, groups, wanted["subagent_sessions"], wanted["subagent_share"], seed)
        prompts = [request.input_tokens for tree in found for request in tree.requests()]
        inner = statistics.median(request.input_tokens for request in _subagents(found))
        block = found[0].block_tokens
        now = round(block * wanted["subagent_input_median"] / inner) / block
        missing = wanted["input_mean"] / (now * statistics.mean(prompts))
        if abs(missing - 1.0) < nearest:
            nearest, by, made = abs(missing - 1.0), now, found
        if nearest < _CLOSE:
            break
        turns *= missing
    roots = [request.output_tokens for tree in made for request in _others(tree)]
    root_factor = wanted["root_output_median"] / max(1.0, statistics.median(roots))
    others = [request.output_tokens for request in _subagents(made)]
    factor = _others_factor([root_factor * tokens for tokens in roots], others, wanted["output_median"])
    stretch = Stretch(by, root_factor)
    made = [stretched_by(tree, by, root_factor, factor) for tree in made]
    made, dropped = drop_long(made, round(wanted["most_context"]))
    return made, stretch, dropped


def _subagents(trees: Sequence[SessionTree]) -> list[TraceRequest]:
    return [
        request
        for tree in trees
        for number, item in enumerate(tree.conversations)
        if of_subagent(tree, number)
        for request in item.requests
    ]


def _others(tree: SessionTree) -> list[TraceRequest]:
    return [
        request
        for number, item in enumerate(tree.conversations)
        if not of_subagent(tree, number)
        for request in item.requests
    ]


def _others_factor(settled: Sequence[float], others: Sequence[int], median: float) -> float:
    """By what `others` have to be multiplied for the median of all to be `median`, or as near to it as they can."""
    low, high = 0.01, 100.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        if statistics.median([*settled, *(middle * tokens for tokens in others)]) < median:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def described(trees: Sequence[SessionTree]) -> dict[str, float]:
    """Of some sessions what corpora are described by; keys as in `corpora.toml`."""
    requests = [request for tree in trees for request in tree.requests()]
    roots = [request for tree in trees for request in _others(tree)]
    inner = _subagents(trees)
    counts = [sum(item.kind == "subagent" for item in tree.conversations) for tree in trees]
    having = [count for count in counts if count] or [0]
    turns = [len(tree.root.requests) for tree in trees]
    prompts = [request.input_tokens for request in requests]
    new = [hit.input_tokens - hit.cached_tokens for tree in trees for hit in prompt_hits([tree])]
    pauses = [request.gap_s for tree in trees for request in tree.root.requests[1:]]

    held = [
        (before.input_tokens + before.output_tokens, (before.duration_s or 0.0) + after.gap_s)
        for tree in trees
        for before, after in itertools.pairwise(tree.root.requests)
    ]
    held_s = sum(seconds for _, seconds in held)

    def at(values: Sequence[float], share: float) -> float:
        return float(np.quantile(np.asarray(values, float), share)) if values else 0.0

    inner_prompts = [request.input_tokens for request in inner]
    root_prompts = [request.input_tokens for request in roots]
    root_answers = [request.output_tokens for request in roots]
    return {
        "turns_mean": statistics.mean(turns),
        "turns_median": at(turns, 0.5),
        "turns_p90": at(turns, 0.9),
        "subagent_sessions": sum(count > 0 for count in counts) / len(counts),
        "subagents_median": at(having, 0.5),
        "subagents_mean": statistics.mean(having),
        "subagent_requests": len(inner) / max(1, sum(counts)),
        "subagent_share": len(inner) / max(1, len(roots)),
        "input_mean": statistics.mean(prompts),
        "input_median": at(prompts, 0.5),
        "input_p90": at(prompts, 0.9),
        "input_p99": at(prompts, 0.99),
        "root_input_median": at(root_prompts, 0.5),
        "root_input_p90": at(root_prompts, 0.9),
        "subagent_input_median": at(inner_prompts, 0.5),
        "subagent_input_p90": at(inner_prompts, 0.9),
        "new_median": at(new, 0.5),
        "new_mean": statistics.mean(new),
        "context_mean": sum(tokens * seconds for tokens, seconds in held) / held_s if held_s else 0.0,
        "hits": 1.0 - sum(new) / sum(prompts),
        "output_median": at([request.output_tokens for request in requests], 0.5),
        "output_mean": statistics.mean(request.output_tokens for request in requests),
        "root_output_median": at(root_answers, 0.5),
        "root_output_p90": at(root_answers, 0.9),
        "pause_median": at(pauses, 0.5),
        "pause_p90": at(pauses, 0.9),
        "pause_p99": at(pauses, 0.99),
    }


_NAMES = {
    "turns": "requests of a root agent",
    "subagent_sessions": "sessions with subagents",
    "subagents": "subagents of these",
    "subagent_requests": "requests of a subagent, mean",
    "subagent_share": "requests of subagents to another",
    "input": "prompt tokens",
    "root_input": "prompt tokens of root agents",
    "subagent_input": "prompt tokens of subagents",
    "new": "new tokens of a prompt",
    "context": "tokens of a root agent over time",
    "hits": "hits, cache without end",
    "output": "answer tokens",
    "root_output": "answer tokens of root agents",
    "pause": "pause of a root agent, s",
}
_ENDINGS = {"mean": ", mean", "median": ", median", "p90": ", 90 %", "p99": ", 99 %"}


def comparison_lines(made: Mapping[str, float], corpus: Corpus) -> list[str]:
    """What sessions were made to have, and what came of the rest, beside what is known of the corpus."""
    lines = [f"sessions as those of {corpus.title}", f"  there: {corpus.source}"]
    lines.append(f"  {'':<42} {'here':>10} {'there':>10}")
    for key, value in made.items():
        known = corpus.wanted.get(key, corpus.described.get(key))
        if known is None:
            continue
        stem, _, ending = key.rpartition("_")
        name = _NAMES[key] if key in _NAMES else _NAMES[stem] + _ENDINGS[ending]
        digits = 3 if known < 1 else 1 if known < 1000 else 0
        mark = "" if key in corpus.wanted else "  (not asked for)"
        lines.append(f"  {name:<42} {value:>10,.{digits}f} {known:>10,.{digits}f}{mark}")
    return lines
