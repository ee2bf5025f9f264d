from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from longturn.bench.hit_rate import hit_rate
from longturn.bench.traces.errors import TraceError
from longturn.bench.traces.load import load_shipped, load_traces, parse_trace, shipped_traces
from longturn.bench.traces.tree import SessionTree
from tests.bench.make_traces import EXAMPLE, row, session, shared, tree


def parse(data: Any, **options: Any) -> list[SessionTree]:
    return parse_trace(json.dumps(data).encode(), "file.json", **options)


# --- Weka ------------------------------------------------------------------------------------------------------------


def test_the_worked_example() -> None:
    (found,) = parse(EXAMPLE)
    root, child = found.conversations
    assert [request.gap_s for request in root.requests] == [0.0, 4.5]
    assert [(r.input_tokens, r.output_tokens, found.trie.ids(r.node)) for r in found.requests()] == [
        (300, 70, [0, 1, 2, 3]),
        (460, 40, [0, 1, 2, 3, 4, 5, 6]),
        (200, 90, [7, 8, 9]),
    ]
    assert (child.id, child.kind, child.label) == ("demo-1::sa:agent_001", "subagent", "Explore")
    assert (child.parent, child.spawn_after, child.join_before, child.requests[0].gap_s) == (0, 0, 1, 0.5)
    assert (root.system_tokens, child.system_tokens) == (128, 64)
    hit = hit_rate([found])
    assert (hit.hit_blocks, hit.blocks) == (0 + 0 + 4, 4 + 3 + 7)
    assert (hit.cached_tokens, hit.input_tokens) == (4 * 64, 300 + 200 + 460)


def test_unknown_fields_are_ignored_and_optional_ones_may_be_missing() -> None:
    rows = [{"t": 0, "type": "n", "in": 9, "out": 0, "novelty": {"x": 1}}]
    (found,) = parse({"id": "a", "block_size": 4, "requests": rows, "totals": [], "models": 3})
    (request,) = found.requests()
    assert (request.duration_s, request.model, found.trie.depth(request.node)) == (None, "", 0)


def test_an_unknown_duration_counts_the_pause_from_the_start() -> None:
    found = tree([row(0, [1], api=None), row(5, [1, 2], api=2.0), row(6.5, [1, 2, 3])], split=False)
    assert [request.gap_s for request in found.root.requests] == [0.0, 5.0, 0.0]


def subagent(t: float, times: list[float], **more: Any) -> dict[str, Any]:
    rows = [row(at, [50 + i for i in range(k + 1)]) for k, at in enumerate(times)]
    return {"t": t, "type": "subagent", "agent_id": f"a{t}", "requests": rows, **more}


@pytest.mark.parametrize(
    ("entry", "starts"),
    [
        (subagent(3.0, [3.0, 5.0], duration_ms=9000), [3.0, 5.0]),  # the session's clock
        (subagent(12.0, [0.0, 8.0], duration_ms=9500), [2.5, 10.5]),  # relative, written down at the end
        (subagent(2.5, [0.0, 8.0], duration_ms=9500), [2.5, 10.5]),  # relative, written down at the start
        (subagent(2.5, [0.0, 8.0]), [2.5, 10.5]),
    ],
)
def test_when_a_subagent_ran(entry: dict[str, Any], starts: list[float]) -> None:
    found = tree([row(0, [1, 2], api=2.0), entry, row(14.0, [1, 2, 3]), row(20.0, [1, 2, 3, 4])])
    child = found.conversations[1]
    assert [request.start_s for request in child.requests] == starts
    assert (child.spawn_after, child.join_before) == (0, 1)


def test_a_subagent_that_outlives_a_turn_joins_later_or_never() -> None:
    turns = [row(0, [1], api=2.0), row(6.0, [1, 2]), row(12.0, [1, 2, 3])]
    late = tree([turns[0], subagent(3.0, [3.0, 8.0]), *turns[1:]]).conversations[1]
    never = tree([turns[0], subagent(3.0, [3.0, 30.0]), *turns[1:]]).conversations[1]
    assert (late.spawn_after, late.join_before) == (0, 2)
    assert (never.spawn_after, never.join_before) == (0, None)


def at(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The example with one value replaced, or removed where the value is `...`."""
    data = copy.deepcopy(EXAMPLE)
    target: Any = data
    for step in path[:-1]:
        target = target[step]
    if value is ...:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("id",), "", "file.json: id must not be empty"),
        (("block_size",), 0, "block_size must be at least 1, not 0"),
        (("block_size",), "64", "block_size: expected `int`, got `str`: '64'"),
        (("block_size",), ..., "missing required field `block_size`"),
        (("hash_id_scope",), "global", "hash_id_scope must be 'local', not 'global'"),
        (("requests",), [], "requests must hold at least one request"),
        (("requests", 0, "t"), -1.0, r"requests\[0\].t must be 0 or more, not -1.0"),
        (("requests", 0, "t"), 7.0, r"requests\[2\].t 6.5 is before that of the request ahead of it"),
        (("requests", 0, "in"), 0, r"requests\[0\].in must be at least 1, not 0"),
        (("requests", 0, "in"), 255, r"requests\[0\].hash_ids has 4 blocks of 64 tokens, more than 'in' 255 holds"),
        (("requests", 0, "in"), ..., r"requests\[0\] has no 'in'"),
        (("requests", 2, "out"), ..., r"requests\[2\] has no 'out'"),
        (("requests", 2, "out"), -3, r"requests\[2\].out must be 0 or more, not -3"),
        (("requests", 2, "out"), 1.5, r"requests\[2\].out: expected `int \| null`, got `float`: 1.5"),
        (("requests", 2, "api_time"), -0.1, r"requests\[2\].api_time must be 0 or more, not -0.1"),
        (("requests", 2, "type"), "q", r"requests\[2\].type must be one of n, s, subagent, not 'q'"),
        (
            ("requests", 1, "requests", 0, "type"),
            "subagent",
            r"requests\[1\].requests\[0\].type must be one of n, s, not",
        ),
        (("requests", 1, "requests"), ..., r"requests\[1\] has no 'requests'"),
        (("requests", 2, "hash_ids", 3), -5, r"requests\[2\].hash_ids\[3\] must be 0 or more, not -5"),
        (("requests", 2, "hash_ids", 2), 3, r"hash_ids\[2\] is 3, here after block 1 and elsewhere after block 2"),
        (("requests", 2, "hash_ids", 2), 0, r"hash_ids\[2\] is 0, here after block 1 and elsewhere the first block"),
        (("requests", 1, "requests", 0, "hash_ids", 0), 2, r"requests\[1\].requests\[0\].hash_ids\[0\] is 2"),
    ],
)
def test_broken_sessions(path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        parse(at(path, value))
    assert str(caught.value).startswith("file.json: ") and "\n" not in str(caught.value)


def test_an_agent_id_must_not_be_there_twice() -> None:
    entry = subagent(3.0, [3.0])
    with pytest.raises(TraceError, match=r"requests\[2\].agent_id 'a3.0' is there twice"):
        tree([row(0, [1]), entry, entry, row(9.0, [1, 2])])


# --- Mooncake --------------------------------------------------------------------------------------------------------


def lines(*rows: dict[str, Any]) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


def test_mooncake_lines_are_sessions_of_one_namespace() -> None:
    data = lines(
        {"timestamp": 0, "input_length": 1025, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 1500, "input_length": 600, "output_length": 0, "hash_ids": [0, 3], "tools": []},
    )
    one, two = parse_trace(data, "dir/m.jsonl.gz")
    assert (one.id, two.id, one.namespace) == ("m:1", "m:2", "m") and one.trie is two.trie
    assert (two.arrival_s, two.root.requests[0].start_s, two.block_tokens) == (1.5, 0.0, 512)
    hit = hit_rate([one, two])
    assert (hit.hit_blocks, hit.blocks, hit.cached_tokens) == (1, 5, 512)


def test_mooncake_sessions_with_delays() -> None:
    data = lines(
        {"session_id": "x", "timestamp": 1000, "input_length": 10, "output_length": 5},
        {"session_id": 7, "input_length": 20, "output_length": 5},
        {"session_id": "x", "delay": 2500, "input_length": 30, "output_length": 5},
        {"session_id": "x", "timestamp": 9000, "input_length": 40, "output_length": 5},
    )
    x, seven = parse_trace(data, "m.jsonl")
    assert (x.id, seven.id) == ("m:x", "m:7")
    assert [(r.start_s, r.gap_s, r.input_tokens) for r in x.requests()] == [(0, 0, 10), (2.5, 2.5, 30), (8.0, 5.5, 40)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_length": 0}, "m.jsonl: line 2: input_length must be at least 1, not 0"),
        ({"output_length": -1}, "line 2: output_length must be 0 or more, not -1"),
        ({"timestamp": -1}, "line 2: timestamp must be 0 or more, not -1"),
        ({"delay": -1}, "line 2: delay must be 0 or more, not -1"),
        ({"hash_ids": [0, 1, 2, 3]}, "line 2: hash_ids has 4 blocks of 512 tokens, more than input_length 1025 holds"),
        ({"hash_ids": [0, 2]}, r"line 2: request.hash_ids\[1\] is 2, here after block 0 and elsewhere after block 1"),
        ({"input_length": "x"}, "line 2: input_length: expected `int`, got `str`: 'x'"),
        ({"timestamp": 3}, "line 2: timestamp 3.0 is before that of its session's line ahead of it"),
    ],
)
def test_broken_mooncake_lines(change: dict[str, Any], message: str) -> None:
    good = {"session_id": "a", "timestamp": 4, "input_length": 1025, "output_length": 5, "hash_ids": [0, 1, 2]}
    with pytest.raises(TraceError, match=message):
        parse_trace(lines(good, good | change), "m.jsonl")


# --- files -----------------------------------------------------------------------------------------------------------


def test_files_folders_and_compression(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    one, two, three = (session([row(0, [1])], id=name) | {"id": name} for name in "abc")
    (tmp_path / "one.json").write_text(json.dumps(one, indent=1))
    (tmp_path / "deep" / "both.jsonl.gz").write_bytes(gzip.compress(lines(two, three) + b"\n\n"))
    (tmp_path / "notes.txt").write_text("no trace")
    found = load_traces([tmp_path, tmp_path / "one.json"])
    assert [item.id for item in found] == ["b", "c", "a"]
    assert found[1].source.endswith("both.jsonl.gz: line 2")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty file"),
        (b"[1, 2]", "line 1 is no JSON object"),
        (b"\n{oops", "line 2 is no JSON object: '{oops'"),
        (b'{"prompt": "x"}', r"no known trace format: .* \(prompt\)"),
        (gzip.compress(b'{"id": "a"}' * 50, mtime=0)[:-12], "damaged gzip file"),
        (lines(session([row(0, [1])]), session([row(0, [1])])), "session id 's' is in .*line 1 and in .*line 2"),
        (lines(session([row(0, [1])]), {"id": 3}), "line 2: id: expected `str`, got `int`: 3"),
        (b'{"requests": ' * 5000, "line 1 is no JSON object"),
        (b'{"input_length": 3, "output_length": 1}\n{"input', "line 2: not JSON"),
        (b"\xff\xfe\x00", "line 1 is no JSON object"),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as caught:
        load_traces([path])
    assert str(path) in str(caught.value)


def test_paths_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file or folder"):
        load_traces([tmp_path / "none"])
    with pytest.raises(TraceError, match="no traces in it"):
        load_traces([tmp_path])


def test_shipped_traces() -> None:
    assert shipped_traces() == ["arrivals.jsonl", "desk.jsonl", "workers.jsonl", "workshop.json"]
    kinds = [[item.kind for item in found.conversations] for name in shipped_traces() for found in load_shipped(name)]
    desk = [["root", "subagent"], ["root"], ["root", "subagent", "subagent"], ["root"]]
    others = [["root", "aux", "worker", "worker"], ["root"], ["root", "subagent"]]
    assert kinds == [["root"]] * 4 + desk + others
    with pytest.raises(TraceError, match="no shipped trace 'x'"):
        load_shipped("x")


# --- recorded traces: counted again here, without the code under test -------------------------------------------------


@pytest.mark.parametrize("split", [True, False])
def test_recorded_weka_sessions_agree_with_an_independent_count(split: bool) -> None:
    folder = shared("weka")
    found = load_traces([folder], split=split)
    files = sorted(folder.glob("*.json.gz"))
    assert [Path(item.source) for item in found] == files
    hits = blocks = 0
    for item, path in zip(found, files, strict=True):
        data = json.loads(gzip.decompress(path.read_bytes()))
        own = [entry for entry in data["requests"] if entry["type"] != "subagent"]
        inner = [part for entry in data["requests"] if entry["type"] == "subagent" for part in entry["requests"]]
        named = {f"requests[{n}]": entry for n, entry in enumerate(data["requests"])}
        named |= {
            f"requests[{n}].requests[{k}]": part
            for n, entry in enumerate(data["requests"])
            for k, part in enumerate(entry.get("requests", []))
        }
        requests = list(item.requests())
        assert len(requests) == len({r.place for r in requests}) == len(own) + len(inner)
        for request in requests:
            part = named[request.place]
            assert (request.input_tokens, request.output_tokens) == (part["in"], part["out"])
            assert item.trie.depth(request.node) == len(part["hash_ids"])
        totals = data["totals"]["combined_tokens"]
        assert sum(r.input_tokens for r in requests) == sum(part["in"] for part in own + inner) == totals["input"]
        assert sum(r.output_tokens for r in requests) == sum(part["out"] for part in own + inner) == totals["output"]
        # Only hit counts of sessions whose order in time is plain can be taken from the file's own order.
        seen: set[int] = set()
        for part in sorted(own, key=lambda part: part["t"]):
            known = 0
            while known < len(part["hash_ids"]) and part["hash_ids"][known] in seen:
                known += 1
            seen.update(part["hash_ids"])
            hits += known if not inner else 0
            blocks += len(part["hash_ids"]) if not inner else 0
    plain = [item for item in found if not any(part.kind == "subagent" for part in item.conversations)]
    counted = hit_rate(plain)
    assert (counted.hit_blocks, counted.blocks) == (hits, blocks)


def test_recorded_subagents_end_before_the_turn_that_has_their_results() -> None:
    found = load_traces([shared("weka")], split=False)
    children = [(item, part) for item in found for part in item.conversations if part.kind == "subagent"]
    assert len(children) == 13
    for item, part in children:
        assert part.spawn_after is not None
        later = [request for request in item.root.requests if request.start_s > part.start_s]
        assert (part.join_before is None) == (not later)
        if later:
            assert part.join_before == part.spawn_after + 1 and part.requests[0].gap_s < 1


def test_recorded_mooncake_requests_agree_with_an_independent_count() -> None:
    for path in sorted(shared("mooncake").glob("*.jsonl.gz")):
        rows = [json.loads(text) for text in gzip.decompress(path.read_bytes()).splitlines()]
        found = load_traces([path])
        assert len(found) == len(rows)
        assert sum(item.root.requests[0].input_tokens for item in found) == sum(part["input_length"] for part in rows)
        assert sum(item.root.requests[0].output_tokens for item in found) == sum(part["output_length"] for part in rows)
        assert [item.arrival_s for item in found] == [part["timestamp"] / 1000 for part in rows]
        seen: set[int] = set()
        hits = 0
        for part in rows:
            hits += next((n for n, block in enumerate(part["hash_ids"]) if block not in seen), len(part["hash_ids"]))
            seen.update(part["hash_ids"])
        counted = hit_rate(found)
        assert (counted.hit_blocks, counted.blocks) == (hits, sum(len(part["hash_ids"]) for part in rows))
        assert len(found[0].trie) == len(seen)
