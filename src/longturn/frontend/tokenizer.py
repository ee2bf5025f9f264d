"""Text to token ids and back, over the `tokenizers` library. Token ids are all that the rest of the engine sees.

A token's bytes are known one by one (byte-level BPE, or SentencePiece with byte fallback), which is what makes
incremental detokenisation exact and cheap; a tokenizer of another kind is refused when it is loaded.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from longturn.errors import ModelError, RequestError
from longturn.frontend.gguf_tokenizer import bytes_of_alphabet, gguf_backend
from longturn.gguf_file import read_gguf
from longturn.source import ModelSource

DEFAULT_TEMPLATE = "default"
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """What stands beside the vocabulary in a checkpoint."""

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """By role, as chat templates name them: `bos_token`, `eos_token`, ..."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """Jinja source by name; `default` is the usual one, others are such as `tool_use`."""


class Tokenizer:
    """A vocabulary with its rules. Safe to use from several threads; `encode` lets others run while it works."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenizerSettings, *, name: str = "tokenizer") -> None:
        """
        Raises:
            ModelError: the decoder is of a kind whose tokens have no bytes of their own; the message uses `name`.
        """
        backend.no_truncation()
        backend.no_padding()
        self.settings = settings
        self._backend = backend
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": "none"}
        kinds = {step["type"] for step in _flatten(decoder, "decoders")}
        if "ByteLevel" in kinds:
            self._byte_level = True
        elif kinds & {"ByteFallback", "Metaspace"}:
            self._byte_level = False
        else:
            raise ModelError(f"{name}: tokenizer decoder {decoder['type']} is not supported (ByteLevel, ByteFallback)")
        self.strips_leading_space = not self._byte_level and bool(kinds & {"Strip", "Metaspace"})
        """Decoding drops one space at the start of the text, which encoding had put there."""
        self.adds_prefix_space = not self._byte_level and _prepends(backend)
        """Encoding puts a space before text that does not start with a special token."""
        self._alphabet = bytes_of_alphabet()
        added: Mapping[int, tokenizers.AddedToken] = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Tokens that `decode` skips: control tokens, not text."""
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        """Tokens that have text; the model's head may have more rows."""
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; special tokens that are written out in it become their ids.

        Args:
            text: any text.
            add_special_tokens: put what the tokenizer puts around a whole text (often a beginning-of-text token).

        Raises:
            RequestError: the text is not valid Unicode (it holds half of a surrogate pair).
        """
        try:
            # The batch call gives up the interpreter lock and skips offsets; the single call does neither.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError("text is not valid Unicode (it has an unpaired surrogate)", param="prompt") from error
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of whole token ids; bytes that are no UTF-8 become U+FFFD."""
        # Not the library's decode: that takes the letters of added tokens for bytes ("café" comes back broken).
        skip = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join([self.token_bytes(i) for i in ids if i not in skip]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; empty for ids that have no token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """A token's bytes as text; a piece of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """Id of the token that is spelled `token` in the vocabulary, such as `<|im_end|>`."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def special(self, name: str) -> str | None:
        """Text of the special token for a role such as `eos_token`."""
        return self.settings.special_tokens.get(name)

    @property
    def eos_id(self) -> int | None:
        return None if (token := self.special("eos_token")) is None else self.token_id(token)

    @property
    def bos_id(self) -> int | None:
        return None if (token := self.special("bos_token")) is None else self.token_id(token)

    def special_text(self, token_id: int) -> str:
        """How a control token is written; empty for a token that is text."""
        return self._added[token_id] if token_id in self.special_ids else ""

    def special_prefix(self, text: str) -> str | None:
        """The special token that `text` begins with (the longest), if any."""
        tokens = (self._added[i] for i in self.special_ids)
        return max((token for token in tokens if token and text.startswith(token)), key=len, default=None)

    def _find_bytes(self, token_id: int) -> bytes:
        if (content := self._added.get(token_id)) is not None:
            return content.encode()
        token: str | None = self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        if token is None:
            return b""
        if self._byte_level:
            mapped = [self._alphabet.get(char, -1) for char in token]
            return token.encode() if -1 in mapped else bytes(mapped)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            with contextlib.suppress(ValueError):  # "<0xZZ>" is an ordinary token that only looks like a byte
                return bytes([int(token[3:5], 16)])
        return token.replace(_SPACE, " ").encode()


def _flatten(rule: Mapping[str, Any], member: str) -> list[Mapping[str, Any]]:
    """A rule and all rules in it, where rules are sequences of rules."""
    return [rule, *(inner for part in rule.get(member, ()) for inner in _flatten(part, member))]


def _prepends(backend: tokenizers.Tokenizer) -> bool:
    steps: list[Mapping[str, Any]] = []
    if backend.normalizer is not None:
        steps += _flatten(json.loads(backend.normalizer.__getstate__()), "normalizers")
    if backend.pre_tokenizer is not None:
        steps += _flatten(json.loads(backend.pre_tokenizer.__getstate__()), "pretokenizers")
    return any(s["type"] == "Prepend" or s.get("prepend_scheme", "never") != "never" for s in steps)


# --- from a checkpoint -----------------------------------------------------------------------------------------------


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer and chat templates of a checkpoint: its tokenizer.json and settings, or GGUF metadata.

    Nothing of it is kept in the cache directory: building from GGUF metadata takes as long as reading a prepared
    tokenizer.json would (0.1 s for 49,000 tokens).

    Raises:
        ModelError: files are missing or damaged, or the tokenizer is of a kind that Longturn does not serve.
    """
    if source.kind == "gguf":
        metadata = read_gguf(source.path, max_array=None).metadata
        backend, special = gguf_backend(metadata, str(source.path))
        templates = {
            key.removeprefix("tokenizer.chat_template").lstrip(".") or DEFAULT_TEMPLATE: value
            for key, value in metadata.items()
            if key.startswith("tokenizer.chat_template") and isinstance(value, str)
        }
        return Tokenizer(backend, TokenizerSettings(special, templates), name=str(source.path))
    path = source.path / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{source.path}: tokenizer.json is missing")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for whatever it cannot read
        raise ModelError(f"{path}: not a tokenizer that can be read ({' '.join(str(error).split())})") from error
    return Tokenizer(backend, _read_settings(source.path), name=str(path))


def _read_settings(directory: Path) -> TokenizerSettings:
    config = _read_json(directory / "tokenizer_config.json")
    special: dict[str, str] = {}
    for values in (_read_json(directory / "special_tokens_map.json"), config):
        for name in _SPECIAL_NAMES:
            value = values.get(name)
            token = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(token, str):
                special[name] = token
    templates: dict[str, str] = {}
    listed = config.get("chat_template")
    if isinstance(listed, str):
        templates[DEFAULT_TEMPLATE] = listed
    elif isinstance(listed, list):
        templates.update({str(entry["name"]): str(entry["template"]) for entry in listed if "template" in entry})
    # A template in a file of its own is the newer convention and wins, as in transformers.
    files = {DEFAULT_TEMPLATE: directory / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    for name, file in files.items():
        if file.is_file():
            templates[name] = file.read_text(encoding="utf-8")
    return TokenizerSettings(special, templates)


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value
