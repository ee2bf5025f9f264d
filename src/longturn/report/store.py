"""A store of points: one SQLite file that grows over months and keeps every point's JSON byte for byte.

Columns beside the JSON are copies for selecting and are never read back as figures.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from longturn.report.point import Point, point_from_json, point_id
from longturn.report.schema import ResultError

APPLICATION_ID = 0x4C54504E
"""Written into the file's header ("LTPN"), so that another program's database is never written to."""
STORE_VERSION = 1

COLUMNS: Mapping[str, str] = {
    "configuration": "TEXT",
    "engine": "TEXT",
    "model": "TEXT",
    "quantisation": "TEXT",
    "chip": "TEXT",
    "chips": "INTEGER",
    "traces": "TEXT",
    "source": "TEXT",
    "speculation": "TEXT",
    "concurrency": "INTEGER",
    "valid": "INTEGER",
    "created": "TEXT",
}
"""What can be selected by."""


@dataclass(frozen=True, slots=True)
class StoredPoint:
    id: str
    data: bytes
    """Exactly as it was added."""

    @property
    def point(self) -> Point:
        return point_from_json(self.data, f"stored point {self.id}")


class Store:
    """Use as a context manager."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        """Open a store.

        Args:
            path: the file.
            create: make it, and its folder, if it is missing.

        Raises:
            ResultError: it is missing, cannot be written, is no store, or was written by a newer version.
        """
        self.path = path
        if not path.exists() and not create:
            raise ResultError(f"{path}: no such store")
        try:
            if create:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path)
        except (OSError, sqlite3.Error) as error:
            raise ResultError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
        try:
            self._prepare()
        except sqlite3.Error as error:
            self._db.close()
            raise ResultError(f"{path}: {error}") from error
        except ResultError:
            self._db.close()
            raise

    def _prepare(self) -> None:
        application = self._db.execute("PRAGMA application_id").fetchone()[0]
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        empty = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        if empty and application == 0:
            columns = ", ".join(f"{name} {kind} NOT NULL" for name, kind in COLUMNS.items())
            with self._db:
                # In one transaction: two processes may open a new store at the same time.
                self._db.execute("BEGIN IMMEDIATE")
                self._db.execute(
                    f"CREATE TABLE IF NOT EXISTS points (id TEXT PRIMARY KEY, {columns}, json BLOB NOT NULL)"
                )
                self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                self._db.execute(f"PRAGMA user_version = {STORE_VERSION}")
        elif application != APPLICATION_ID:
            raise ResultError(f"{self.path}: a database, but not a store of results")
        elif version != STORE_VERSION:
            raise ResultError(f"{self.path}: store version {version} is not known (this version reads {STORE_VERSION})")

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._db.close()

    def add(self, data: bytes, name: str = "point") -> bool:
        """Add a point's JSON. The same bytes are kept once.

        Returns:
            Whether it was new.

        Raises:
            ResultError: not a point (names `name`), or the file cannot be written.
        """
        point = point_from_json(data, name)
        values = (point_id(data), *_columns(point).values(), data)
        marks = ", ".join("?" * len(values))
        try:
            with self._db:
                return self._db.execute(f"INSERT OR IGNORE INTO points VALUES ({marks})", values).rowcount == 1
        except sqlite3.Error as error:
            raise ResultError(f"{self.path}: {error}") from error

    def select(self, **wanted: str | int | bool) -> list[StoredPoint]:
        """Points whose columns have these values (all points without any), by configuration, concurrency and date.

        Args:
            wanted: `COLUMNS` and their values: `select(model="m", chips=4, valid=True)`.

        Raises:
            ResultError: an unknown column, or the file cannot be read.
        """
        for column in wanted:
            if column not in COLUMNS:
                raise ResultError(f"unknown column '{column}' (known: {', '.join(COLUMNS)})")
        where = " AND ".join(f"{column} = ?" for column in wanted)
        query = "SELECT id, json FROM points" + (f" WHERE {where}" if where else "")
        query += " ORDER BY configuration, concurrency, created, id"
        try:
            rows = self._db.execute(query, tuple(wanted.values())).fetchall()
        except sqlite3.Error as error:
            raise ResultError(f"{self.path}: {error}") from error
        return [StoredPoint(identity, bytes(data)) for identity, data in rows]

    def __len__(self) -> int:
        count: int = self._db.execute("SELECT count(*) FROM points").fetchone()[0]
        return count


def _columns(point: Point) -> dict[str, str | int]:
    return {
        "configuration": point.configuration,
        "engine": f"{point.engine.name} {point.engine.version}",
        "model": point.model.name,
        "quantisation": point.model.quantisation,
        "chip": point.platform.chip,
        "chips": point.platform.chips,
        "traces": point.traces.name,
        "source": point.source,
        "speculation": point.speculation.mode,
        "concurrency": point.concurrency,
        "valid": int(point.validity.valid),
        "created": point.created,
    }
