"""The measured kernel tables, as columns.

Parquet files of the public repository ai-dynamo/aiconfigurator (data, Apache-2.0). Reading them needs pyarrow, which
only this part of Longturn uses: `pip install 'longturn[simulate-fit]'`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longturn.errors import ConfigError

Columns = Mapping[str, NDArray[Any]]
SOURCE = "ai-dynamo/aiconfigurator 095f58a, tables of vLLM 0.24.0 (collectives: NCCL 2.29.2)"
DATE = "2026-11"


def read_table(directory: Path, name: str) -> Columns | None:
    """All columns of one table; None if the directory has no such table.

    Raises:
        ConfigError: pyarrow is not installed, or the file is damaged.
    """
    path = directory / f"{name}.parquet"
    if not path.is_file():
        return None
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ConfigError("reading kernel tables needs pyarrow: pip install 'longturn[simulate-fit]'") from None
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"kernel table {path}: cannot be read ({error})") from None
    return {column: np.array(table[column].to_pylist()) for column in table.column_names}


def numbers(table: Columns, column: str, rows: NDArray[np.bool_]) -> NDArray[np.float64]:
    """One column of some rows, as floating-point numbers."""
    values: NDArray[np.float64] = table[column][rows].astype(np.float64)
    return values
