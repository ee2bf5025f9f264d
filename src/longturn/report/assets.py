"""Templates, styles and scripts of the pages, which lie beside this file, and how a page is put together from them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

import msgspec


def assets(*names: str) -> str:
    """The text of these files, one after the other."""
    folder = resources.files("longturn.report")
    return "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


def filled(template: str, parts: Mapping[str, str]) -> str:
    """The file `template` with its marks `@@NAME@@` replaced by the parts of these names."""
    # The template is cut at its marks, not searched again and again: text put in must never be taken for a mark.
    pieces = assets(template).split("@@")
    return "".join(piece if index % 2 == 0 else parts[piece] for index, piece in enumerate(pieces))


def script_data(data: Any) -> str:
    """JSON for a script element."""
    # "<" would let a label end the script element; as \u003c it is the same JSON.
    return msgspec.json.encode(data).decode().replace("<", "\\u003c")
