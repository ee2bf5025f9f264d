"""The chained page hash: one key for everything that a page of 128 tokens holds.

hash[i] = blake2b-128(key = salt digest, hash[i-1] + int32 bytes of tokens 128*i .. 128*i+127)

blake2b is keyed and collision-resistant, so that no client can craft a prompt that hits another's pages; the salt
(`cache_salt`, API key) separates tenants. Hashing 142,000 tokens costs about 1.5 ms; only a suffix is hashed when the
first pages' hashes are known.
"""

from __future__ import annotations

import hashlib

from longturn.config import PAGE_TOKENS

HASH_BYTES = 16
_PAGE_BYTES = 4 * PAGE_TOKENS
_ROOT = bytes(HASH_BYTES)


def salt_key(*parts: str | None) -> bytes:
    """Key for `page_hashes` from what separates caches (cache salt, API key, model name)."""
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        data = b"" if part is None else part.encode()
        digest.update(len(data).to_bytes(8, "little") + (b"n" if part is None else b"s") + data)
    return digest.digest()


def next_page_hash(parent: bytes | None, page: bytes, key: bytes) -> bytes:
    """Hash of one more page of a chain.

    Args:
        parent: hash of the page before; None for the first page.
        page: its PAGE_TOKENS token ids, int32 little-endian.
        key: from `salt_key`.
    """
    digest = hashlib.blake2b(_ROOT if parent is None else parent, digest_size=HASH_BYTES, key=key)
    digest.update(page)
    return digest.digest()


def page_hashes(tokens: bytes, key: bytes, known: tuple[bytes, ...] = ()) -> tuple[bytes, ...]:
    """Hashes of the whole pages of `tokens` (int32 little-endian).

    Args:
        tokens: all token ids of the sequence.
        key: from `salt_key`.
        known: hashes of the first pages, if they have been computed before for the same tokens and key.
    """
    view = memoryview(tokens)
    hashes = list(known)
    parent = hashes[-1] if hashes else _ROOT
    for begin in range(len(hashes) * _PAGE_BYTES, len(view) - _PAGE_BYTES + 1, _PAGE_BYTES):
        digest = hashlib.blake2b(parent, digest_size=HASH_BYTES, key=key)
        digest.update(view[begin : begin + _PAGE_BYTES])
        parent = digest.digest()
        hashes.append(parent)
    return tuple(hashes)
