"""Whether the file that a measurement is to end in can be written, asked before it begins."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from longturn.errors import ConfigError


def check_output(file: Path, what: str) -> None:
    """Make the file's folder and write to it; the file itself stays as it is.

    `what` begins the error and ends before the file's name: "cannot write plans to".

    Raises:
        ConfigError: the folder cannot be made or written, or the file's name is a folder's.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except FileExistsError as error:
        raise ConfigError(f"{what} {file}: {file.parent} is no directory") from error
    except OSError as error:
        raise ConfigError(f"{what} {file}: {error.strerror or error}") from error
