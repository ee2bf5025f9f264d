"""A small vocabulary for grammar tests, and random JSON schemas."""

from __future__ import annotations

import random
from typing import Any

from longturn.grammar_library import Vocabulary

END, OPEN, CLOSE = 256, 257, 258
"""Token ids of the end of an answer and of two more control tokens."""
WORDS = (
    '"',
    '":',
    '": ',
    '","',
    ", ",
    "{}",
    "[]",
    "true",
    "false",
    "null",
    "ab",
    "abc",
    "12",
    "\n  ",
    "tion",
    "é",
    "name",
)
PADDING = 21
TOKENS: tuple[bytes, ...] = (
    *(bytes([byte]) for byte in range(256)),
    b"<|end|>",
    b"<|open|>",
    b"<|close|>",
    *(word.encode() for word in WORDS if len(word.encode()) > 1),
    *(b"" for _ in range(PADDING)),
)
VOCAB = len(TOKENS)
"""Not a multiple of 32, so that the last word of a mask has bits that stand for nothing."""


def encode(text: str) -> list[int]:
    """The longest token at every place; control tokens are never read."""
    data, ids, at = text.encode(), [], 0
    by_length = sorted(
        (i for i in range(VOCAB) if TOKENS[i] and i not in (END, OPEN, CLOSE)), key=lambda i: -len(TOKENS[i])
    )
    while at < len(data):
        token = next(i for i in by_length if data.startswith(TOKENS[i], at))
        ids.append(token)
        at += len(TOKENS[token])
    return ids


def decode(ids: list[int]) -> str:
    return b"".join(TOKENS[i] for i in ids).decode("utf-8", "replace")


def vocabulary() -> Vocabulary:
    return Vocabulary(TOKENS, (END, OPEN, CLOSE), (END,), encode)


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of the keywords that agents' tools and answers use, whose instances are short more often than not."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format", "bounded"]
    if depth > 0:
        kinds += ["object", "object", "object", "array", "array", "anyOf", "tuple", "nullable", "map"]
    kind = rng.choice(kinds)
    if kind == "string":
        low = rng.randrange(3)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(12)}
    if kind in ("integer", "bounded"):
        low = rng.randrange(-50, 50)
        upper = "exclusiveMaximum" if rng.random() < 0.3 else "maximum"
        return {"type": "integer", "minimum": low, upper: low + rng.randrange(1, 1000)}
    if kind == "number":
        low = rng.randrange(-5, 5)
        return {"type": "number", "minimum": low, "maximum": low + rng.choice([1, 2.5, 10])}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "enum":
        return {"enum": rng.sample(["red", "grün", 1, 2.5, None, True, 'a"b', {"x": 1}, [1, 2]], rng.randrange(1, 5))}
    if kind == "const":
        return {"const": rng.choice(["on", 7, False, {"k": ["v"]}])}
    if kind == "pattern":
        return {
            "type": "string",
            "pattern": rng.choice([r"^[a-c]{2,4}$", r"^(yes|no)$", r"^\d{3}-\d{2}$", r"^[A-Z][a-z]*$"]),
        }
    if kind == "format":
        return {"type": "string", "format": rng.choice(["date", "time", "date-time", "ipv4", "uuid"])}
    if kind == "array":
        low = rng.randrange(2)
        return {
            "type": "array",
            "items": random_schema(rng, depth - 1),
            "minItems": low,
            "maxItems": low + rng.randrange(3),
        }
    if kind == "tuple":
        items = [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}
    if kind == "nullable":
        return {"type": [rng.choice(["boolean", "object"]), "null"], "additionalProperties": False}
    if kind == "map":
        return {"type": "object", "additionalProperties": random_schema(rng, 0)}
    names = rng.sample(["name", "age", "über", "a b", "x", "list", "$id_", 'q"t'], rng.randrange(4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def random_document(rng: random.Random) -> dict[str, Any]:
    """A whole schema, now and then with parts that are referred to, one of them by itself."""
    if rng.random() < 0.75:
        return random_schema(rng)
    node = {
        "type": "object",
        "properties": {
            "value": {"$ref": "#/$defs/part"},
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$defs": {"part": random_schema(rng, 1), "node": node}, "$ref": "#/$defs/node"}
