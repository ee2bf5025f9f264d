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
    certificate = _read("ssl_certfile", server.ssl_certfile)
    key = certificate if server.ssl_keyfile is None else _read("ssl_keyfile", server.ssl_keyfile)
    # The library says of both only that it is not content.
    if b"CERTIFICATE-----" not in certificate:
        raise ConfigError(f"server.ssl_certfile {server.ssl_certfile} holds no certificate in PEM")
    if b"PRIVATE KEY-----" not in key and server.ssl_keyfile is None:
        raise ConfigError(
            f"server.ssl_certfile {server.ssl_certfile} holds no private key: name it in server.ssl_keyfile"
        )
    if b"PRIVATE KEY-----" not in key:
        raise ConfigError(f"server.ssl_keyfile {server.ssl_keyfile} holds no private key in PEM")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A password would be asked for on the terminal, where a server must not wait.
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(f"server.ssl_certfile {server.ssl_certfile} cannot be used: {reason}") from None
    return True


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"server.{name}: cannot read {path}: {error.strerror}") from None
