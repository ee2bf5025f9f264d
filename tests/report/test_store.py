from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longturn.report.point import point_id, point_to_json
from longturn.report.schema import ResultError
from longturn.report.store import Store
from tests.report.points import point, sweep


def test_every_byte_comes_back(tmp_path: Path) -> None:
    # Spaces and key order are the writer's: what is kept is the file, not our rendering of it.
    odd = b" " + point_to_json(sweep()[0]).replace(b'"kind"', b'  "kind"')
    datas = [odd, *map(point_to_json, sweep())]
    with Store(tmp_path / "deep" / "s.db") as store:
        assert [store.add(data) for data in datas] == [True] * len(datas)
        assert not store.add(odd)
        assert len(store) == len(datas)
    with Store(tmp_path / "deep" / "s.db", create=False) as store:
        found = {stored.id: stored.data for stored in store.select()}
        assert found == {point_id(data): data for data in datas}
        assert [stored.point for stored in store.select(configuration="plain LRU", concurrency=6)] == [
            p for p in sweep() if p.concurrency == 6
        ]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3), st.sampled_from(["H200", "B200"])), max_size=8))
def test_select_is_a_filter_of_all(made: list[tuple[str, int, str]]) -> None:
    points = [point(name, live, 10.0, 5.0, chip=chip) for name, live, chip in made]
    with Store(Path(":memory:")) as store:
        for one in points:
            store.add(point_to_json(one))
        distinct = {point_id(point_to_json(one)): one for one in points}
        assert [s.point.concurrency for s in store.select(configuration="a")] == sorted(
            one.concurrency for one in distinct.values() if one.configuration == "a"
        )
        chosen = store.select(chip="H200", concurrency=2, valid=True)
        expected = {k for k, one in distinct.items() if one.platform.chip == "H200" and one.concurrency == 2}
        assert {s.id for s in chosen} == expected


def test_what_cannot_be_stored_or_selected(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        with pytest.raises(ResultError, match=r"bad\.json: "):
            store.add(b"{}", "bad.json")
        with pytest.raises(ResultError, match="unknown column 'color'"):
            store.select(color="red")
        with pytest.raises(ResultError, match="unknown column"):
            store.select(**{"id = '' OR 1 --": "x"})
        assert len(store) == 0


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="no such store"):
        Store(tmp_path / "none.db", create=False)
    text = tmp_path / "text.db"
    text.write_text("not a database, and long enough to be looked at as one" * 20)
    with pytest.raises(ResultError, match=r"text\.db"):
        Store(text)
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE t (x)")
    with pytest.raises(ResultError, match="not a store"):
        Store(other)
    newer = tmp_path / "newer.db"
    Store(newer).__exit__(None, None, None)
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version = 9")
    with pytest.raises(ResultError, match="store version 9"):
        Store(newer)
    with pytest.raises(ResultError):
        Store(tmp_path)
