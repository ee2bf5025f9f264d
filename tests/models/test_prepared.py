"""Prepared files: made once, whole or not at all, checked on every load."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import longturn.prepared as prepared
from longturn.errors import ConfigError, ModelError
from longturn.prepared import file_digest, prepared_entry, prepared_key, require_writable, source_digest


class Builder:
    def __init__(self, content: bytes = b"weights") -> None:
        self.content = content
        self.calls = 0

    def __call__(self, directory: Path) -> None:
        self.calls += 1
        (directory / "data.bin").write_bytes(self.content)


def leftovers(root: Path) -> list[str]:
    return [p.name for p in root.iterdir() if p.name.startswith(".") and not p.name.endswith(".lock")]


def test_built_once_and_found_again(tmp_path: Path) -> None:
    build = Builder()
    root = tmp_path / "deep" / "cache"
    entry = prepared_entry(root, "k", build)
    assert (entry / "data.bin").read_bytes() == b"weights"
    assert prepared_entry(root, "k", build) == entry
    assert build.calls == 1
    assert prepared_entry(root, "other", build) != entry
    assert build.calls == 2
    assert leftovers(root) == []


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest", "no-manifest"])
def test_damage_is_found_and_repaired(damage: str, tmp_path: Path) -> None:
    build = Builder()
    entry = prepared_entry(tmp_path, "k", build)
    with (entry / "data.bin").open("rb") as still_open:
        if damage == "flip":
            (entry / "data.bin").write_bytes(b"weightz")
        elif damage == "cut":
            os.truncate(entry / "data.bin", 3)
        elif damage == "remove":
            (entry / "data.bin").unlink()
        elif damage == "manifest":
            (entry / "manifest.json").write_text("[1, 2")
        else:
            (entry / "manifest.json").unlink()
        assert prepared_entry(tmp_path, "k", build) == entry
        assert build.calls == 2
        assert (entry / "data.bin").read_bytes() == b"weights"
        still_open.read()  # the old file is gone from the directory, not from under its readers
    assert leftovers(tmp_path) == []


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "half.bin").write_bytes(b"x")
        raise ModelError("no such tensor")

    with pytest.raises(ModelError, match="no such tensor"):
        prepared_entry(tmp_path, "k", fail)
    assert not (tmp_path / "k").exists()
    assert leftovers(tmp_path) == []
    assert prepared_entry(tmp_path, "k", Builder()).is_dir()


def test_full_disk_is_one_line_that_names_the_directory(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory / "data.bin"))

    with pytest.raises(ConfigError, match="No space left") as caught:
        prepared_entry(tmp_path, "k", fail)
    assert str(tmp_path) in str(caught.value)
    assert leftovers(tmp_path) == []


def test_a_builders_own_trouble_is_not_blamed_on_the_cache(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/elsewhere/model.gguf")

    with pytest.raises(PermissionError):
        prepared_entry(tmp_path, "k", fail)


def test_cache_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="cannot be written") as caught:
            prepared_entry(place, "k", Builder())
        assert str(place) in str(caught.value)


def run_unprivileged(code: str) -> subprocess.CompletedProcess[str]:
    """Root may write anywhere, so permissions are tested without its rights."""
    drop = "import os\nif os.getuid() == 0:\n    os.setgid(65534); os.setuid(65534)\n"
    setup = "from longturn.prepared import prepared_entry, source_digest\nfrom pathlib import Path\n"
    command = [sys.executable, "-c", setup + drop + textwrap.dedent(code)]
    env = {**os.environ, "PYTHONPATH": str(Path(prepared.__file__).parents[1])}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env=env)


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that another user can reach; pytest's own ones are private."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_read_only_directory(open_path: Path) -> None:
    root = open_path / "cache"
    entry = prepared_entry(root, "ready", Builder())
    for path in (root, entry):
        path.chmod(0o555)
    code = f"""
    from longturn.errors import ConfigError
    def build(directory): raise AssertionError("must not build")
    assert prepared_entry({str(root)!r}, "ready", build) == Path({str(entry)!r})
    assert source_digest({str(root)!r}, [Path({str(entry / "data.bin")!r})])
    try:
        prepared_entry({str(root)!r}, "new", build)
    except ConfigError as error:
        print(error)
    """
    try:
        done = run_unprivileged(code)
    finally:
        for path in (root, entry):
            path.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"cache directory {root} cannot be written (Permission denied)")
    assert done.stdout.count("\n") == 1


def test_concurrent_processes_build_once(tmp_path: Path) -> None:
    code = """
    import sys, time
    from pathlib import Path
    from longturn.prepared import prepared_entry
    def build(directory):
        (directory / "data.bin").write_bytes(b"x" * 1000)
        time.sleep(0.3)
        with open(sys.argv[2], "a") as log:
            log.write("built\\n")
    print((prepared_entry(sys.argv[1], "k", build) / "data.bin").stat().st_size)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "cache"), str(tmp_path / "log")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [p.communicate()[0].strip() for p in processes] == ["1000"] * 4
    assert (tmp_path / "log").read_text() == "built\n"


def test_digest_is_of_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "_CHUNK_BYTES", 1000)
    path = tmp_path / "f"
    content = os.urandom(3500)
    path.write_bytes(content)
    pieces = [hashlib.blake2b(content[i : i + 1000], digest_size=32).digest() for i in range(0, 3500, 1000)]
    want = hashlib.blake2b((3500).to_bytes(8, "little") + b"".join(pieces), digest_size=32).hexdigest()
    assert file_digest(path) == want
    changed = bytearray(content)
    changed[2000] ^= 1
    path.write_bytes(changed)
    assert file_digest(path) != want


def test_remembered_digest_follows_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(prepared, "file_digest", lambda path: calls.append(path) or file_digest(path))
    path = tmp_path / "model.bin"
    path.write_bytes(b"one")
    first = source_digest(tmp_path / "cache", [path])
    assert source_digest(tmp_path / "cache", [path]) == first
    assert len(calls) == 1
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    assert source_digest(tmp_path / "cache", [path]) != first
    for note in (tmp_path / "cache" / "digests").iterdir():
        note.write_text("garbage")
    assert source_digest(tmp_path / "cache", [path]) != first
    with pytest.raises(ModelError, match="cannot be read"):
        source_digest(tmp_path / "cache", [tmp_path / "gone"])


def test_keys_do_not_run_together() -> None:
    assert prepared_key("w", 1, "ab", "c") != prepared_key("w", 1, "a", "bc")
    assert prepared_key("w", 1, "a") != prepared_key("w", 2, "a")
    assert prepared_key("w", 1, "a").startswith("w-v1-")


def test_a_directory_that_cannot_be_written_is_named_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert require_writable(tmp_path / "new" / "cache") == tmp_path / "new" / "cache"
    assert list((tmp_path / "new" / "cache").iterdir()) == []
    (tmp_path / "file").write_text("x")
    monkeypatch.chdir(tmp_path)
    for refused in (tmp_path / "file" / "cache", Path("file/cache")):
        with pytest.raises(ConfigError, match=f"cache directory {refused} cannot be written"):
            require_writable(refused)
