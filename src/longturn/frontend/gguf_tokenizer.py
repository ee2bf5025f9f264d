"""A tokenizer from GGUF metadata: `gpt2` (byte-level BPE with its split rule) and `llama` (SentencePiece BPE).

GGUF names the split rule (`tokenizer.ggml.pre`) but does not hold it. The rules below are those of the published
tokenizer.json of each family. For `smollm` that is: every digit by itself, then GPT-2's pattern. The order matters
("a  5" is "a", two spaces, "5"), and a converter that leaves the digit rule out gives other tokens there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from longturn.errors import ModelError

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_SPACE = "\u2581"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN2 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_GPT2_FAMILY = ("default", "gpt-2", "gpt2")
_DIGIT_FAMILY = ("smollm", "starcoder", "refact")
_SPLITS: Mapping[str, str] = {
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}
_ROLES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}


def bytes_of_alphabet() -> dict[str, int]:
    """Byte of each character of the byte-level alphabet: printable Latin-1 as itself, others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def gguf_backend(metadata: Mapping[str, Any], where: str) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer that GGUF metadata describes, and its special tokens by role (`bos_token`, ...).

    Args:
        metadata: with whole arrays.
        where: the file's name, for messages.

    Raises:
        ModelError: the kind of tokenizer or its split rule is not supported, or the metadata is damaged.
    """
    kind = metadata.get("tokenizer.ggml.model", "(none named)")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{where}: GGUF metadata has no vocabulary (tokenizer.ggml.tokens)")
    if kind == "gpt2":
        backend = _byte_level(metadata, tokens, where)
    elif kind == "llama":
        backend = _sentencepiece(metadata, tokens, where)
    else:
        raise ModelError(f"{where}: tokenizer model '{kind}' is not supported (supported: gpt2, llama)")
    types = metadata.get("tokenizer.ggml.token_type") or []
    pairs = list(zip(tokens, types, strict=False))
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, kind in pairs if kind == _CONTROL])
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t, kind in pairs if kind == _USER_DEFINED])
    special: dict[str, str] = {}
    for role, key in _ROLES.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            special[role] = tokens[token_id]
    if metadata.get("tokenizer.ggml.add_bos_token", kind == "llama") and (bos := special.get("bos_token")):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokens.index(bos))]
        )
    return backend, special


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], where: str) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    split: pre_tokenizers.PreTokenizer
    if pre in _GPT2_FAMILY:
        split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    elif pre in _DIGIT_FAMILY:
        split = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif pre in _SPLITS:
        split = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        known = ", ".join(sorted((*_GPT2_FAMILY, *_DIGIT_FAMILY, *_SPLITS)))
        raise ModelError(f"{where}: tokenizer split rule '{pre}' is not supported (supported: {known})")
    merges = _merges(metadata, where)
    if merges is None:
        raise ModelError(f"{where}: GGUF metadata has no tokenizer.ggml.merges")
    # Qwen2's and Llama 3's published files normalise and ignore merges so; GGUF has no place to say it.
    ignore_merges = _SPLITS.get(pre) is _LLAMA3
    backend = _build(models.BPE, where, vocab=_vocabulary(tokens), merges=merges, ignore_merges=ignore_merges)
    if _SPLITS.get(pre) is _QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], where: str) -> Tokenizer:
    vocabulary = _vocabulary(tokens)
    merges = _merges(metadata, where)
    if merges is None:
        scores = metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, list) or len(scores) != len(tokens):
            raise ModelError(f"{where}: GGUF metadata has neither tokenizer.ggml.merges nor tokenizer.ggml.scores")
        merges = _merges_from_scores(vocabulary, scores)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    backend = _build(
        models.BPE,
        where,
        vocab=vocabulary,
        merges=merges,
        byte_fallback=True,
        fuse_unk=True,
        unk_token=tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None,
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    replace = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back)
    return backend


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(tokens)}


def _build(model: Any, where: str, **arguments: Any) -> Tokenizer:
    try:
        return Tokenizer(model(**arguments))
    except Exception as error:  # the library raises plain Exception, for a merge of unknown tokens among others
        raise ModelError(f"{where}: damaged tokenizer in GGUF metadata ({' '.join(str(error).split())})") from error


def _merges(metadata: Mapping[str, Any], where: str) -> list[tuple[str, str]] | None:
    lines = metadata.get("tokenizer.ggml.merges")
    if not isinstance(lines, list):
        return None
    merges = []
    for line in lines:
        left, space, right = line.partition(" ")
        if not space:
            raise ModelError(f"{where}: damaged tokenizer in GGUF metadata (merge {line!r} is not two tokens)")
        merges.append((left, right))
    return merges


def _merges_from_scores(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The pair merges that SentencePiece's BPE scores stand for: it joins the neighbours whose whole scores best."""
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, token_id in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[token_id], vocabulary[left], vocabulary[right], (left, right)))
    return [pair for *_, pair in sorted(found)]
