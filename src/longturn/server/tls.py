"""Certificates for HTTPS, checked before anything is started."""

from __future__ import annotations

import ssl
from pathlib import Path

from longturn.config import ServerConfig
from longturn.errors import ConfigError


def check_certificate(server: ServerConfig) -> bool:
    """Whether to serve HTTPS.

    Raises:
        ConfigError: a file cannot be read, is not PEM, is locked with a password, or does not go with the other.
    """
    if server.ssl_certfile is None:
        if server.ssl_keyfile is not None:
            raise ConfigError("server.ssl_keyfile is given without server.ssl_certfile")
        return False
    for name in ("ssl_certfile", "ssl_keyfile"):
        path = getattr(server, name)
        if path is not None:
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise ConfigError(f"server.{name}: cannot read {path}: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A password would be asked for on the terminal, where a server must not wait.
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(f"server.ssl_certfile {server.ssl_certfile} cannot be used: {reason}") from None
    return True
