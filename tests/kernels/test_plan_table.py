"""Tables of kernel plans: which entry applies, what a file may hold."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import pytest

from longturn.errors import ConfigError
from longturn.kernels.plan_table import Entry, PlanTable, load_table, store_table, table_path


@dataclass(frozen=True)
class Plan:
    tile: int = 16
    slices: bool = False
    most: int | None = None


TABLE = PlanTable(
    "card", (Entry("a", "4x4", 16, {"tile": 32}), Entry("a", "4x4", 4, {"slices": True}), Entry("b", "4x4", 1, {}))
)


@pytest.mark.parametrize(
    ("rows", "plan"),
    [
        (1, Plan()),
        (2, Plan(slices=True)),
        (4, Plan(slices=True)),
        (5, Plan()),
        (8, Plan(tile=32)),
        (16, Plan(tile=32)),
        (17, Plan()),
    ],
)
def test_an_entry_serves_its_rows_and_down_to_half_of_them(rows: int, plan: Plan) -> None:
    assert TABLE.apply("a", "4x4", rows, Plan()) == plan
    assert TABLE.apply("a", "4x8", rows, Plan()) == Plan() == TABLE.apply("c", "4x4", rows, Plan())


def test_an_entry_takes_the_place_of_the_one_before() -> None:
    table = TABLE.with_entry(Entry("a", "4x4", 16, {"tile": 64}))
    assert len(table.entries) == 3 and table.apply("a", "4x4", 16, Plan()).tile == 64
    assert TABLE.apply("a", "4x4", 16, Plan()).tile == 32
    assert table.without("a", "4x4", 16).apply("a", "4x4", 16, Plan()) == Plan()


def test_what_is_stored_is_loaded(tmp_path: Path) -> None:
    path = table_path(tmp_path, "NVIDIA H200 (test)")
    assert path == tmp_path / "plans" / "nvidia-h200-test.json"
    kinds = {"a": Plan, "b": Plan}
    assert load_table(path, "card", kinds) == PlanTable("card")
    store_table(path, TABLE)
    assert load_table(path, "card", kinds) == TABLE
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"version": 2, "device": "card", "plans": []}',
        '{"version": 1, "device": "another", "plans": []}',
        '{"version": 1, "device": "card", "plans": [{"kernel": "a"}]}',
    ],
)
def test_a_file_that_cannot_be_used_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    path = tmp_path / "plans.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert load_table(path, "card", {"a": Plan}) == PlanTable("card")
    assert str(path) in caplog.text


def test_entries_for_other_kernels_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "plans.json"
    bad = [Entry("a", "x", 1, {"unknown": 3}), Entry("z", "x", 1, {"tile": 3})]
    data = PlanTable("card", (*bad, Entry("a", "x", 2, {"tile": 8}))).as_dict()
    data["plans"].append({"kernel": "a", "shape": "x", "rows": 4, "fields": {"tile": "wide"}})
    path.write_text(json.dumps(data))
    with caplog.at_level(logging.WARNING):
        assert [entry.rows for entry in load_table(path, "card", {"a": Plan}).entries] == [2]
    assert "3 of 4 plans" in caplog.text


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write plans to"):
        store_table(tmp_path / "file" / "plans.json", TABLE)
