"""The API keys that a server accepts, from its configuration and from a file."""

from __future__ import annotations

from pathlib import Path

from longturn.config import ServerConfig
from longturn.errors import ConfigError


def accepted_keys(server: ServerConfig) -> tuple[str, ...]:
    """All accepted keys, each once; none admits everyone.

    Raises:
        ConfigError: the file cannot be read, or has no key: it must not open a server that was meant to be closed.
    """
    keys = list(server.api_keys)
    if server.api_keys_file is not None:
        keys += _read(Path(server.api_keys_file))
    return tuple(dict.fromkeys(keys))


def _read(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"server.api_keys_file: cannot read {path}: {reason}") from None
    lines = (line.strip() for line in text.splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"server.api_keys_file: {path} has no key")
    return keys
