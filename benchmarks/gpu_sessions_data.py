"""Recorded agent sessions as `gpu_sessions.py` replays them: read, their prompts made, and what their gaps leave to
be reached. The rules are in the head of that file."""

from __future__ import annotations

import gzip
import itertools
import json
import multiprocessing
import random
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MOST_TOKENS, LEAST_TURNS, START, MOST_GAP_S, MOST_OUTPUT = 120_000, 10, 0.4, 3.0, 1200
MOST_TURNS = 24
"""Of a session that are prepared: more than a minute holds."""
PEER_SEED = 42
"""Shuffles sessions, sorted by file, into an order whose first turns have the medians that the peer's had: 110,044 in
and 473 out for the 9 turns of one lane, 101,203 and 357 for the 36 of four."""
BLOCK = 64
VOCAB = 200_064
PEER = {1: (150.0, 17_599, 77, 0.991, 0.171, 0.950), 4: (108.6, 55_727, 262, 0.989, 0.188, 0.440)}
"""vLLM 0.25.1 under the same rules: P90 tok/s/user, total tok/s, output tok/s, hit rate, TTFT p50 and p90."""


@dataclass(frozen=True)
class Turn:
    """One request of a session."""

    tokens: int
    output: int
    gap_s: float
    """After the end of the turn before."""
    blocks: list[int]
    """Ids of the prompt's 64-token blocks, the last perhaps not whole."""


def pack(traces: Path, data: Path) -> None:
    """Write the turns from just before 40 % on of every session that qualifies."""
    sessions = []
    for path in sorted(traces.glob("*.json.gz")):
        with gzip.open(path) as file:
            entries = [e for e in json.load(file)["requests"] if e.get("hash_ids") and e.get("in")]
        entries = list(itertools.takewhile(lambda e: e["in"] <= MOST_TOKENS, entries))
        if len(entries) < LEAST_TURNS:
            continue
        turns: list[list[Any]] = []
        end = None
        for e in entries:
            gap = 0.0 if end is None else min(max(e["t"] - end, 0.0), MOST_GAP_S)
            end = e["t"] + (e.get("api_time") or 0.0)
            turns.append([e["in"], min(max(e["out"], 1), MOST_OUTPUT), round(gap, 3), runs(e["hash_ids"])])
        first = int(START * len(turns))
        sessions.append(turns[max(first - 1, 0) :])
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_bytes(gzip.compress(json.dumps(sessions).encode()))
    print(f"{len(sessions)} sessions, {sum(map(len, sessions))} turns, {data.stat().st_size / 1e6:.1f} MB")


def runs(ids: list[int]) -> list[list[int]]:
    """Consecutive ids as [first, count]."""
    out: list[list[int]] = []
    for number in ids:
        if out and number == out[-1][0] + out[-1][1]:
            out[-1][1] += 1
        else:
            out.append([number, 1])
    return out


def read(data: Path) -> list[list[Turn]]:
    """Sessions in the order in which the peer replayed them."""
    sessions = json.loads(gzip.decompress(data.read_bytes()))
    random.Random(PEER_SEED).shuffle(sessions)
    return [
        [Turn(t, o, g, [i for first, count in b for i in range(first, first + count)]) for t, o, g, b in turns]
        for turns in sessions
    ]


class Prompts:
    """Prompts and page hashes of one session, made before the clock runs: a server's frontend does this elsewhere."""

    def __init__(self, number: int, turns: list[Turn], vocab: int) -> None:
        """`number` tells apart replays of one session: they share nothing. A block's id decides its tokens."""
        from longturn.engine.hashing import page_hashes

        self.number = number
        self.prompts: list[bytes] = []
        self.hashes: list[tuple[bytes, ...]] = []
        blocks: dict[int, bytes] = {}
        for turn in turns:
            for block in turn.blocks:
                if block not in blocks:
                    blocks[block] = _tokens((number, block), BLOCK, vocab)
            prompt = b"".join(blocks[block] for block in turn.blocks)[: 4 * turn.tokens]
            missing = turn.tokens - len(prompt) // 4  # ids may end before a last, short block
            prompt += _tokens((number, turn.tokens, 1), missing, vocab)
            known = self._known(prompt)
            self.prompts.append(prompt)
            self.hashes.append(page_hashes(prompt, KEY, known))

    def _known(self, prompt: bytes) -> tuple[bytes, ...]:
        """Hashes of the pages that this prompt begins with like the one before it."""
        if not self.prompts:
            return ()
        last, same = self.prompts[-1], 0
        while same < len(self.hashes[-1]) and prompt[512 * same : 512 * same + 512] == last[512 * same :][:512]:
            same += 1
        return self.hashes[-1][:same]


KEY = b"s" * 32


def _tokens(seed: tuple[int, ...], count: int, vocab: int) -> bytes:
    return np.random.default_rng(seed).integers(vocab, size=count, dtype=np.int32).tobytes()


def prepare(sessions: list[list[Turn]], vocab: int, count: int) -> list[Prompts]:
    """Prompts of the first `count` sessions, by as many processes as there are processors."""
    todo = [(i, sessions[i % len(sessions)][:MOST_TURNS], vocab) for i in range(count)]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        return list(pool.map(_prepare, todo))


def _prepare(work: tuple[int, list[Turn], int]) -> Prompts:
    return Prompts(*work)


@dataclass(frozen=True)
class Means:
    """Of the turns that the first sessions send in a while, by an engine that needs no time."""

    turns: int
    gap_s: float
    prompt: float
    output: float

    def total_tok_s(self, sessions: int, turn_s: float) -> float:
        """Prompt and output tokens a second, if every turn takes `turn_s`."""
        return sessions * (self.prompt + self.output) / (self.gap_s + turn_s)


def means(sessions: list[list[Turn]], count: int, seconds: float) -> Means:
    """Of what `count` sessions send within `seconds`, no turn taking any time."""
    sent: list[Turn] = []
    for number in range(count):
        now = 0.0
        for turn in itertools.cycle(sessions[number % len(sessions)][1:MOST_TURNS]):
            now += turn.gap_s
            if now > seconds:
                break
            sent.append(turn)
    mean = statistics.mean
    return Means(len(sent), mean(t.gap_s for t in sent), mean(t.tokens for t in sent), mean(t.output for t in sent))


def bound(sessions: list[list[Turn]], counts: list[int], seconds: float) -> None:
    """Print what the gaps leave to be reached by each of `counts` sessions at once, in a replay of so many seconds."""
    for count in counts:
        m = means(sessions, count, seconds)
        line = f"{count:>3} sessions: mean gap {m.gap_s:.2f} s, prompt {m.prompt:,.0f}, output {m.output:.0f} tokens;"
        line += f" total at most {m.total_tok_s(count, 0.0):,.0f} tok/s if turns took no time"
        for itl_ms in (1.7, 3.4, 6.5):
            line += f", {m.total_tok_s(count, m.output * itl_ms / 1e3):,.0f} at {itl_ms} ms an output token"
        if count in PEER:
            turn_s = count * (m.prompt + m.output) / (2 * PEER[count][1]) - m.gap_s
            line += f"; twice vLLM's {PEER[count][1]:,} wants {turn_s:.2f} s a turn, {turn_s / m.output * 1e3:.2f} ms"
            line += " an output token"
        print(line)
