"""What installing promises: extras that the source uses, and a Makefile that names the Pythons it takes."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_extra_brings_what_the_source_imports() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert set(extras) > {"dev", "gpu"}
    for extra, requirements in extras.items():
        if extra == "dev":
            continue
        for requirement in requirements:
            (package,) = re.findall(r"^[a-z0-9]+", requirement)
            assert re.search(rf"^\s*(import|from) {package}\b", source, re.MULTILINE), f"{extra}: {package} is not used"


def test_a_machine_with_other_pythons_is_told_which_ones_serve(tmp_path: Path) -> None:
    if (make := shutil.which("make")) is None:
        pytest.skip("no make")
    done = subprocess.run(
        [make, "install", "PYTHON=", f"VENV={tmp_path / 'venv'}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "longturn needs Python 3.11 to 3.13; none of python3.12, python3.11, python3 is one" in done.stderr
