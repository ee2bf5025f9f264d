"""The check of an output file before a measurement."""

from pathlib import Path

import pytest

from longturn.cli.steps.output import check_output
from longturn.errors import ConfigError


def test_a_file_that_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("{}")
    for file in (tmp_path / "old.json", tmp_path / "new" / "made.json"):
        check_output(file, "cannot write")
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["new", "old.json"]
    assert (tmp_path / "old.json").read_text() == "{}"


def test_one_that_cannot_is_named_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for out, why in ((file / "x.json", f"{file} is no directory"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError) as error:
            check_output(out, "--out: cannot write")
        assert str(error.value) == f"--out: cannot write {out}: {why}"
