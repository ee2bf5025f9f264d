"""Sessions made like those of a corpus that is only described."""

from __future__ import annotations

import json
import statistics

import pytest

from longturn.bench.traces.load import load_traces
from longturn.bench.traces.tree import SessionTree
from longturn.bench.traces.weka import parse_weka
from longturn.errors import ConfigError
from longturn.simulate.corpus import Corpus, comparison_lines, corpora, corpus_named, described, made_like
from tests.bench.make_traces import row, session, shared


def donor() -> SessionTree:
    """A session whose first request starts two subagents of two requests."""
    helpers = [
        {"t": 2.0, "type": "subagent", "agent_id": name, "system_tokens": 128,
         "requests": [row(2.0, [900, 901, first], block=64, out=30), row(5.0, [900, 901, first, first + 1], block=64)]}
        for name, first in (("a", 910), ("b", 920))
    ]  # fmt: skip
    rows = [row(0, [0, 1], block=64), *helpers, *(row(10.0 * n, list(range(2 + n)), block=64) for n in range(1, 6))]
    data = {**session(rows, block=64), "id": "donor"}
    return parse_weka(json.dumps(data).encode(), "donor.json", split=False)


def sessions() -> list[SessionTree]:
    def plain(n: int) -> SessionTree:
        rows = [row(t * t, list(range(10 + n + 5 * t)), block=64, out=20 + n) for t in range(8 + n)]
        data = {**session(rows, block=64), "id": f"t{n}"}
        return parse_weka(json.dumps(data).encode(), f"t{n}.json", split=False)

    return [donor(), *map(plain, range(8))]


WANTED = {
    "subagent_sessions": 0.5,
    "subagent_share": 0.4,
    "subagent_requests": 3.0,
    "subagent_input_median": 400.0,
    "input_mean": 9000.0,
    "pause_median": 1.5,
    "pause_p90": 12.0,
    "output_median": 78.0,
    "root_output_median": 80.0,
    "most_context": 60000.0,
}


def test_what_is_wanted_comes_out() -> None:
    corpus = Corpus("c", "C", "nowhere", WANTED, {"hits": 0.9})
    made, stretch, dropped = made_like(sessions(), corpus, 3)
    found = described(made)
    assert found["subagent_sessions"] == pytest.approx(0.5, abs=0.06)
    assert found["subagent_share"] == pytest.approx(0.4, rel=0.15)
    assert found["subagent_requests"] == pytest.approx(3.0, rel=0.05), "the donor's own have two"
    assert found["subagent_input_median"] == pytest.approx(400, rel=0.1), "blocks are whole tokens"
    assert found["input_mean"] == pytest.approx(9000, rel=0.25) and found["turns_mean"] > 12
    assert found["output_median"] == pytest.approx(78, abs=2)
    assert found["root_output_median"] == pytest.approx(80, abs=2)
    assert stretch.input == made[0].block_tokens / 64 and dropped == 0
    again = made_like(sessions(), corpus, 3)[0]
    assert [one.conversations for one in again] == [one.conversations for one in made]
    other = made_like(sessions(), corpus, 4)[0]
    assert [one.conversations for one in other] != [one.conversations for one in made]
    lines = comparison_lines(found, corpus)
    assert len(lines) == 3 + 10 and sum("not asked for" in line for line in lines) == 1


def test_requests_that_became_too_long_are_left_out_and_counted() -> None:
    wanted = {**WANTED, "most_context": 6000.0}
    made, _, dropped = made_like(sessions(), Corpus("c", "C", "nowhere", wanted, {}), 3)
    assert dropped > 0
    assert all(one.input_tokens + one.output_tokens <= 6000 for tree in made for one in tree.requests())


def test_sessions_without_subagents_have_none_to_give() -> None:
    with pytest.raises(ConfigError, match="none to give"):
        made_like(sessions()[1:], Corpus("c", "C", "nowhere", WANTED, {}), 3)


def test_statistics_against_a_count_by_hand() -> None:
    found = described([donor()])
    assert (found["turns_mean"], found["subagents_mean"], found["subagent_requests"]) == (6, 2, 2)
    assert found["subagent_share"] == pytest.approx(4 / 6)
    lengths = [128, 192, 256, 320, 384, 448]  # of the root agent
    assert found["root_input_median"] == pytest.approx(statistics.median([128, 192, 256, 320, 384, 448]))
    inner = [192, 256, 192, 256]
    assert found["input_mean"] == pytest.approx(sum(lengths + inner) / 10)
    # New: the root's 448 tokens, and of the subagents 4 blocks and 2, as they share their first two.
    assert found["hits"] == pytest.approx(1 - (448 + 6 * 64) / sum(lengths + inner))


def test_every_corpus_has_what_is_needed_and_names_its_source() -> None:
    for name, corpus in corpora().items():
        assert corpus_named(name) == corpus and corpus.source
        assert set(corpus.wanted) == set(WANTED), name
        assert not set(corpus.described) - set(described(sessions())), name
    with pytest.raises(ConfigError, match=r"unknown 'x' \(known: agentx-062126"):
        corpus_named("x")


def test_public_sessions_become_like_the_official_ones() -> None:
    """What was not asked for is met as well: the longest prompts to a tenth, hits to a point."""
    corpus = corpus_named("agentx-062126")
    made, _, _ = made_like(load_traces([shared("weka")]), corpus, 42)
    found = described(made)
    for key in ("subagent_share", "subagent_sessions", "output_median", "root_output_median", "subagent_input_median"):
        assert found[key] == pytest.approx(corpus.wanted[key], rel=0.03), key
    assert found["input_mean"] == pytest.approx(corpus.wanted["input_mean"], rel=0.1)
    assert found["hits"] == pytest.approx(corpus.described["hits"], abs=0.01)
    assert found["input_p90"] == pytest.approx(corpus.described["input_p90"], rel=0.15)
    assert found["new_mean"] == pytest.approx(corpus.described["new_mean"], rel=0.15)
