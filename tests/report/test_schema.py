from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longturn.report.schema import ResultError, check_writable, from_json, load_result, save_result, to_json
from tests.report.samples import result


def test_round_trip() -> None:
    data = to_json(result())
    assert from_json(data) == result()
    assert to_json(from_json(data)) == data
    assert json.loads(data)["runs"][1]["turns"][1]["ttft_ms"] == 2800.0


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 99, "schema version 99"),
        (("kind",), "something", "not a longturn-replay file"),
        (("extra",), 1, "unknown field `extra`"),
        (("runs", 0, "turns", 1, "ttft_ms"), "fast", r"\$.runs\[0\].turns\[1\].ttft_ms"),
        (("runs", 0, "totals", "errors"), 0.5, r"totals.errors"),
    ],
)
def test_a_reader_refuses_what_it_does_not_know(path: tuple[Any, ...], value: Any, message: str) -> None:
    data = json.loads(to_json(result()))
    node = data
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(ResultError, match=message) as caught:
        from_json(json.dumps(data).encode(), "r.json")
    assert str(caught.value).startswith("r.json: ")


@pytest.mark.parametrize("data", [b"", b"[1]", b"{\xff"])
def test_not_a_result(data: bytes) -> None:
    with pytest.raises(ResultError):
        from_json(data)


def test_files_are_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "result.json"
    save_result(result(), path)
    assert load_result(path) == result()
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]
    with pytest.raises(ResultError, match=r"missing\.json"):
        load_result(tmp_path / "missing.json")
    blocked = tmp_path / "file"
    blocked.write_text("x")
    with pytest.raises(ResultError, match="cannot write"):
        save_result(result(), blocked / "result.json")


def test_a_file_that_cannot_take_its_place_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "result.json" / "taken").mkdir(parents=True)
    with pytest.raises(ResultError, match="cannot write"):
        save_result(result(), tmp_path / "result.json")
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_folder_is_tried_before_anything_is_measured(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    check_writable(folder)
    check_writable(folder)
    assert list(folder.iterdir()) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(ResultError, match=f"cannot write to {tmp_path}/file/x"):
        check_writable(tmp_path / "file" / "x")
