"""Files made once from a model and kept in the cache directory: packed weights, a tokenizer, compiled kernels.

An entry is a directory `<cache>/<key>/` with a manifest of its files' sizes and hashes. It appears by one rename, so
that no process ever sees half of it; a lock lets only one process build it; a damaged entry is built again. Entries
that are there already are read without writing anything, so a read-only cache directory works once it is filled.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from longturn.errors import ConfigError, ModelError

_MANIFEST = "manifest.json"
_CHUNK_BYTES = 8 << 20
_HASH_THREADS = 4
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST),
    *(errno.ENAMETOOLONG, errno.ELOOP),
)


def cache_directory(cache_dir: str | Path | None) -> Path:
    """The configured cache directory, or `~/.cache/longturn`. It need not exist yet.

    Raises:
        ConfigError: nobody's home.
    """
    if cache_dir is not None:
        return without_tilde(cache_dir)
    try:
        return Path.home() / ".cache" / "longturn"
    except RuntimeError:  # a user id without an entry, as in some containers
        raise ConfigError("there is no home directory to cache in; name a directory with 'cache_dir'") from None


def without_tilde(path: str | Path) -> Path:
    """A path with `~` or `~user` at its beginning replaced. Raises ConfigError if that is nobody's home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{path}: no such home directory") from None


def prepared_key(kind: str, version: int, *parts: str) -> str:
    """A directory name for an entry.

    Args:
        kind: short name of what is prepared, such as `tokenizer`.
        version: format version; raise it whenever the same parts give different files.
        parts: everything else the files depend on (source digest, instruction set, options).
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return f"{kind}-v{version}-{digest.hexdigest()}"


def prepared_entry(cache_dir: str | Path | None, key: str, build: Callable[[Path], None]) -> Path:
    """The directory of entry `key`, building it first if it is missing or damaged.

    Args:
        cache_dir: from `EngineConfig.cache_dir`.
        key: from `prepared_key`.
        build: writes the entry's files (no subdirectories) into the empty directory it is given.

    Returns:
        The entry's directory; every file in it has just been checked against its hash. It is not to be written to.

    Raises:
        ConfigError: the cache directory cannot be made or written, or is full; the message names it.
    """
    root = cache_directory(cache_dir)
    entry = root / key
    if _is_whole(entry):
        return entry
    with _naming(root):
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{key}.lock"):
            if not _is_whole(entry):  # another process may have built it while this one waited
                _build(root, entry, build)
    return entry


def require_writable(cache_dir: str | Path | None) -> Path:
    """The cache directory, made if it is missing.

    Raises:
        ConfigError: it cannot be made or written, or is full; the message names it.
    """
    root = cache_directory(cache_dir)
    with _naming(root):
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=root, prefix=".probe-"):
            return root


def file_digest(path: Path) -> str:
    """Content hash of a file: BLAKE2b over the BLAKE2b hashes of its 8 MiB pieces, so that several cores share it."""
    size = path.stat().st_size
    with path.open("rb") as file:

        def piece(offset: int) -> bytes:
            return hashlib.blake2b(os.pread(file.fileno(), _CHUNK_BYTES, offset), digest_size=32).digest()

        offsets = range(0, size, _CHUNK_BYTES)
        if len(offsets) <= 1:
            pieces = [piece(offset) for offset in offsets]
        else:
            with ThreadPoolExecutor(_HASH_THREADS) as pool:
                pieces = list(pool.map(piece, offsets))
    return hashlib.blake2b(size.to_bytes(8, "little") + b"".join(pieces), digest_size=32).hexdigest()


def source_digest(cache_dir: str | Path | None, files: Sequence[Path]) -> str:
    """One hash of the contents of `files`, for use in `prepared_key`.

    The hash of a file that has not changed (place, inode, size, modification time) is remembered in the cache
    directory; where that cannot be written the hash is computed each time, which costs time and nothing else.

    Raises:
        ModelError: a file cannot be read.
    """
    whole = hashlib.blake2b(digest_size=32)
    for path in files:
        try:
            whole.update(_remembered_digest(cache_directory(cache_dir), path.resolve()).encode())
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    return whole.hexdigest()


def _remembered_digest(root: Path, path: Path) -> str:
    stat = path.stat()
    identity = [str(path), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns]
    note = root / "digests" / f"{hashlib.blake2b(str(path).encode(), digest_size=16).hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(note.read_text(encoding="utf-8"))
        if isinstance(known, dict) and known.get("file") == identity:
            return str(known["digest"])
    digest = file_digest(path)
    with contextlib.suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=note.parent, prefix=".new-")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"file": identity, "digest": digest}, file)
        Path(name).replace(note)
    return digest


def _is_whole(entry: Path) -> bool:
    """True if every file of the manifest is there with its size and hash."""
    try:
        manifest = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, dict[str, Any]] = manifest["files"]
        return all(
            (entry / name).stat().st_size == fact["bytes"] and file_digest(entry / name) == fact["blake2b"]
            for name, fact in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _build(root: Path, entry: Path, build: Callable[[Path], None]) -> None:
    work = Path(tempfile.mkdtemp(dir=root, prefix=f".{entry.name}-"))
    try:
        fresh = work / "new"
        fresh.mkdir()
        build(fresh)
        files = {}
        for path in sorted(fresh.iterdir()):
            files[path.name] = {"bytes": path.stat().st_size, "blake2b": file_digest(path)}
            _sync(path)
        manifest = fresh / _MANIFEST
        manifest.write_text(json.dumps({"key": entry.name, "files": files}, indent=1), encoding="utf-8")
        _sync(manifest)
        if entry.exists():  # damaged: moved aside, not deleted in place, so that a mapped file stays readable
            entry.rename(work / "old")
        fresh.rename(entry)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sync(path: Path) -> None:
    """Contents reach the disk before the rename does: a manifest must not outlive what it describes."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock on `path`; the kernel frees it when the process dies, however it dies."""
    with path.open("a") as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _naming(root: Path) -> Iterator[None]:
    """Turn the operating system's refusal to write at or below `root` into one line that names `root`.

    A builder may fail on files of its own; those errors pass. A full disk shows in `write`, which names no file.
    """
    try:
        yield
    except OSError as error:
        at = Path(error.filename).absolute() if isinstance(error.filename, (str, os.PathLike)) else root.absolute()
        ours = at.is_relative_to(root.absolute()) or root.absolute().is_relative_to(at)
        # Some file systems (/proc) say ENOENT where a directory cannot be made; below one that exists it means a file.
        refused = error.errno in _REFUSED or (error.errno == errno.ENOENT and not root.is_dir())
        if error.errno in _FULL or (refused and ours):
            raise ConfigError(
                f"cache directory {root} cannot be written ({error.strerror}); name another one with 'cache_dir'"
            ) from error
        raise
