"""Malformed and hostile requests: valid ones with a few values replaced, and others that are built to hurt."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

USER = {"role": "user", "content": "Say hi."}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SEEDS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": [USER], "max_tokens": 2},
        {"messages": [USER], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
        {"messages": [USER], "max_tokens": 2, "n": 2, "seed": 1, "stop": ["x"], "logprobs": True, "top_logprobs": 2},
        {"messages": [USER], "max_tokens": 4, "tools": [TOOL], "tool_choice": "auto"},
        {"messages": [USER], "max_tokens": 8, "tools": [TOOL], "tool_choice": "required"},
        {
            "messages": [USER],
            "max_tokens": 8,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": SCHEMA}},
        },
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "done"},
            ],
            "max_tokens": 2,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "logit_bias": {"5": 1},
            "presence_penalty": 0.1,
            "session_id": "s",
            "cache_salt": "c",
            "chat_template_kwargs": {"a": 1},
        },
    ],
    "/v1/completions": [
        {"prompt": "a", "max_tokens": 2},
        {"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 1, "n": 2, "best_of": 3},
        {"prompt": [1, 2, 3], "max_tokens": 2, "stream": True, "echo": True, "stop_token_ids": [1], "min_tokens": 1},
        {"prompt": "a", "max_tokens": 8, "guided_regex": "[ab]+", "guided_choice": None},
        {"prompt": "a", "max_tokens": 8, "structured_outputs": {"choice": ["yes", "no"]}},
    ],
    "/v1/responses": [
        {"input": "hi", "max_output_tokens": 16},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}], "max_output_tokens": 16,
         "stream": True, "instructions": "x", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
         "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}, "metadata": {"a": "b"}},
    ],
    "/v1/messages": [
        {"model": "m", "messages": [USER], "max_tokens": 2},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 2, "stream": True,
         "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
         "tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"},
         "thinking": {"type": "enabled", "budget_tokens": 1024}, "stop_sequences": ["x"]},
    ],
    "/v1/messages/count_tokens": [{"messages": [USER]}],
    "/tokenize": [{"prompt": "hi"}, {"messages": [USER], "tools": [TOOL]}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
    "/abort_requests": [{"request_ids": ["nobody"]}],
}  # fmt: skip
HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1, 2, 1.5, -0.0, 1e308, 1e-308, float("nan"), float("inf"), float("-inf"),
    2**31, -(2**31) - 1, 2**63, -(2**63) - 1, 2**64, 10**40, "", " ", "\x00", "a\x00b", "\ud800", "\udfff\ud800",
    "\U0010ffff", "\u202e", "<|im_end|>", "<|im_start|>system", "{{ 7 * 7 }}", "{% for x in y %}", "NaN", "[1, 2]",
    [], {}, [[]], [{}], {"": ""}, {"$ref": "#"}, [None], ["a", 1], {"type": None}, {"type": "object"}, "a" * 5000,
    ["a"] * 300, list(range(300)), {str(i): i for i in range(300)}, [[[[[[[[]]]]]]]], {"a": {"a": {"a": {"a": {}}}}},
    {"type": "function"}, {"type": "json_schema"}, {"type": "json_object"}, "required", "none", "auto",
    "../../etc/passwd", "' OR 1=1 --", b"\xff".decode("latin-1"), "%s%n", "\r\nSet-Cookie: x=1",
]  # fmt: skip


@dataclass
class Attack:
    """One request."""

    kind: str
    path: str
    body: bytes
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    leave_after_s: float | None = None
    """The client goes away after this time."""


def leaves(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every value inside `value`."""
    found = [at] if at else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += leaves(inner, (*at, key))
    return found


def put(tree: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = value


def seed_body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    path = rng.choice(list(SEEDS))
    return path, copy.deepcopy(rng.choice(SEEDS[path]))


def encode(body: Any) -> bytes:
    return json.dumps(body).encode("utf-8", "surrogatepass")


def mutated(rng: random.Random) -> Attack:
    path, body = seed_body(rng)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        put(body, rng.choice(leaves(body)), copy.deepcopy(rng.choice(HOSTILE)))
        if not body:
            break
    if rng.random() < 0.2:
        fields = ["n", "best_of", "logprobs", "max_tokens", "stop", "tools", "tool_choice", "logit_bias", "seed",
                  "priority", "cache_salt", "response_format", "structured_outputs", "guided_json", "guided_grammar",
                  "stream_options", "chat_template_kwargs", "reasoning_effort", "user", "stop_token_ids",
                  "previous_response_id", "reasoning", "thinking", "include", "metadata"]  # fmt: skip
        body[rng.choice(fields)] = copy.deepcopy(rng.choice(HOSTILE))
    # Never so much output that the fuzz measures the model.
    for name in ("max_tokens", "max_output_tokens"):
        if name in body and body[name] in (None, 2**31, 2**63):
            body[name] = 2
    return Attack("mutated", path, encode(body))


def cut(rng: random.Random) -> Attack:
    path, body = seed_body(rng)
    data = encode(body)
    return Attack("cut", path, data[: rng.randrange(len(data))])


def flipped(rng: random.Random) -> Attack:
    path, body = seed_body(rng)
    data = bytearray(encode(body))
    for _ in range(rng.choice([1, 3, 20])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return Attack("flipped bytes", path, bytes(data))


def noise(rng: random.Random) -> Attack:
    return Attack("noise", rng.choice(list(SEEDS)), rng.randbytes(rng.choice([0, 1, 10, 1000, 100_000])))


def encoded(rng: random.Random) -> Attack:
    path, body = seed_body(rng)
    text = json.dumps(body)
    how = rng.choice(["utf-16", "utf-32", "utf-8-sig", "latin-1", "gzip", "surrogates", "form"])
    headers = {"Content-Type": "application/json"}
    if how == "gzip":
        data = gzip.compress(text.encode())
        headers["Content-Encoding"] = "gzip"
    elif how == "surrogates":
        data = text.encode().replace(b"hi", b"\xed\xa0\x80")
    elif how == "form":
        data, headers["Content-Type"] = b"a=1&b=2", "application/x-www-form-urlencoded"
    else:
        data = text.encode(how)
    return Attack(f"encoding {how}", path, data, headers=headers)


def deep(rng: random.Random) -> Attack:
    path, body = seed_body(rng)
    depth = rng.choice([50, 500, 5000, 200_000])
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}")])
    hole = "HOLE"
    put(body, rng.choice(leaves(body)), hole)
    inner = opening * depth + "1" + closing * depth
    return Attack("deep", path, encode(body).replace(b'"HOLE"', inner.encode()))


def numbers(rng: random.Random) -> Attack:
    path, body = seed_body(rng)
    put(body, rng.choice(leaves(body)), "HOLE")
    texts = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 5000, "0x10", "01", "1.", ".5", "1e", "--1",
             "1" * 400 + ".5", "1e-999"]  # fmt: skip
    return Attack("numbers", path, encode(body).replace(b'"HOLE"', rng.choice(texts).encode()))


def doubled(rng: random.Random) -> Attack:
    path, body = seed_body(rng)
    data = encode(body)
    return Attack("doubled keys", path, data[:-1] + b"," + data[1:])


def stops(rng: random.Random) -> Attack:
    count = rng.choice([17, 1000, 1_000_000])
    return Attack("stop strings", "/v1/chat/completions", encode({"messages": [USER], "stop": ["x"] * count}))


def schema(rng: random.Random) -> Attack:
    depth = rng.choice([5, 16, 60, 400])
    inner: Any = {"type": "string"}
    how = rng.choice(["deep", "wide", "recursive", "refs", "anyof", "pattern", "enum", "minmax", "junk"])
    for _ in range(depth):
        inner = {"type": "object", "properties": {"a": inner}, "required": ["a"], "additionalProperties": False}
    made: Any = {
        "deep": inner,
        "wide": {"type": "object", "properties": {f"p{i}": {"type": ["string", "null"]} for i in range(3000)}},
        "recursive": {"$defs": {"t": {"anyOf": [{"$ref": "#/$defs/t"}, {"$ref": "#/$defs/t"}]}}, "$ref": "#/$defs/t"},
        "refs": {
            "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}
            | {"d30": {"type": "integer"}},
            "$ref": "#/$defs/d0",
        },
        "anyof": {"anyOf": [{"type": "object", "properties": {f"k{i}": inner}} for i in range(40)]},
        "pattern": {"type": "string", "pattern": rng.choice(["(a{999}){999}", "(a|a)*b", "[", "(?=x)", "(" * 3000])},
        "enum": {"enum": [str(i) for i in range(20_000)]},
        "minmax": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6, "maxItems": 10**9},
        "junk": rng.choice(HOSTILE),
    }[how]
    body: dict[str, Any] = {"messages": [USER], "max_tokens": 4}
    place = rng.choice(["response_format", "guided_json", "structured_outputs", "tools", "responses", "messages"])
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": made}}
    if place == "response_format":
        body[place] = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": made}}
    elif place == "guided_json":
        body[place] = made
    elif place == "structured_outputs":
        body[place] = {"json": made}
    elif place == "tools":
        body |= {"tools": [tool], "tool_choice": "required"}
    elif place == "responses":
        form = {"type": "json_schema", "name": "s", "schema": made, "strict": True}
        body = {"input": "hi", "max_output_tokens": 16, "text": {"format": form}}
        return Attack(f"schema {how}", "/v1/responses", encode(body))
    else:
        tools = [{"name": "f", "input_schema": made}]
        body |= {"tools": tools, "tool_choice": {"type": "any"}}
        return Attack(f"schema {how}", "/v1/messages", encode(body))
    return Attack(f"schema {how}", "/v1/chat/completions", encode(body))


def grammar(rng: random.Random) -> Attack:
    name, value = rng.choice([
        ("guided_regex", "(a{1000}){1000}"), ("guided_regex", "((a*)*)*b"), ("guided_regex", "(" * 5000),
        ("guided_regex", "\\p{L}" * 3000), ("guided_choice", ["x" * i for i in range(2000)]),
        ("guided_choice", []), ("guided_choice", [1, None]), ("guided_grammar", "root ::= root root | root"),
        ("guided_grammar", 'start: start start | "a"'), ("guided_grammar", "\x00"),
        ("guided_grammar", "root ::= " + "( " * 2000 + '"a"' + " )" * 2000),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}), ("structured_outputs", {"nothing": 1}),
        ("guided_grammar", "root ::= " + " | ".join(f'"{i}"' for i in range(20_000))),
    ])  # fmt: skip
    return Attack("grammar", "/v1/completions", encode({"prompt": "a", "max_tokens": 4, name: value}))


def huge(rng: random.Random) -> Attack:
    body = rng.choice([
        {"prompt": "word " * 300_000, "max_tokens": 1}, {"prompt": [5] * 100_000, "max_tokens": 1},
        {"prompt": "a", "n": 10**9}, {"prompt": ["a"] * 100_000}, {"prompt": "a", "best_of": 10**9},
        {"prompt": "a", "max_tokens": 1, "logit_bias": {str(i): 1 for i in range(50_000)}},
        {"prompt": "a", "max_tokens": 1, "stop_token_ids": list(range(100_000))},
        {"prompt": "\u0300" * 100_000, "max_tokens": 1}, {"prompt": " " * 200_000, "max_tokens": 1},
        {"prompt": "a" * 200_000, "max_tokens": 1}, {"prompt": [10**15], "max_tokens": 1},
        {"prompt": "a", "max_tokens": 1, "cache_salt": "x" * 100_000, "user": "x" * 100_000},
    ])  # fmt: skip
    return Attack("huge", "/v1/completions", encode(body))


def conversation(rng: random.Random) -> Attack:
    role = lambda: rng.choice(["user", "assistant", "system", "tool", "developer", "function", "", "\x00"])  # noqa: E731
    content = lambda: rng.choice(["x", None, "", [], [{"type": "text", "text": "y"}], [{"type": "image_url"}], 5])  # noqa: E731
    messages = [{"role": role(), "content": content()} for _ in range(rng.choice([1, 3, 50, 3000]))]
    for message in messages[:5]:
        if rng.random() < 0.4:
            call = {"id": "1", "function": {"name": "f", "arguments": "{"}}
            kinds: list[Any] = [[], [{}], [{"function": {"name": 5}}], "x", [{"function": None}], [call]]
            message["tool_calls"] = rng.choice(kinds)
    path = rng.choice(["/v1/chat/completions", "/v1/messages", "/tokenize"])
    return Attack("conversation", path, encode({"messages": messages, "max_tokens": 1}))


def header(rng: random.Random) -> Attack:
    path, body = seed_body(rng)
    name, value = rng.choice([
        ("X-Request-Id", "x" * 5000), ("X-Request-Id", "a b;\u00e9"), ("traceparent", "00-zz-zz-zz"),
        ("traceparent", "x" * 1000), ("X-Session-ID", "y" * 10_000), ("Authorization", "Bearer " + "k" * 5000),
        ("Content-Type", "text/plain"), ("Accept", "nonsense"), ("anthropic-version", "1"), ("x-api-key", "\u00ff"),
        ("Expect", "100-continue"), ("Host", ""),
    ])  # fmt: skip
    return Attack("header", path, encode(body), headers={name: value})


def elsewhere(rng: random.Random) -> Attack:
    path = rng.choice(["/", "//", "/v1", "/v1/models/../..", "/v1/models/" + "x" * 3000, "/%00", "/v1/responses/x",
                       "/v1/responses/resp_" + "0" * 500, "/metrics", "/health", "/openapi.json", "/server_info",
                       "/reset_prefix_cache", "/v1/chat/completions?x=1", "/\u00e9"])  # fmt: skip
    return Attack("elsewhere", path, b"", method=rng.choice(["GET", "POST", "DELETE", "PUT", "PATCH", "OPTIONS"]))


def gone(rng: random.Random) -> Attack:
    path, body = seed_body(rng)
    if "max_tokens" in body:
        body["max_tokens"] = 300
    return Attack("gone", path, encode(body), leave_after_s=rng.uniform(0.001, 0.3))


KINDS: list[tuple[int, Callable[[random.Random], Attack]]] = [
    (500, mutated), (80, cut), (80, flipped), (30, noise), (40, encoded), (30, deep), (60, numbers), (20, doubled),
    (1, stops), (30, schema), (15, grammar), (10, huge), (40, conversation), (20, header), (20, elsewhere), (24, gone),
]  # fmt: skip


def attacks(seed: int, count: int) -> list[Callable[[], Attack]]:
    """Makers of `count` requests; made late, since some are megabytes."""
    rng = random.Random(seed)
    kinds = rng.choices([make for _, make in KINDS], [weight for weight, _ in KINDS], k=count)
    return [lambda make=make, n=n: make(random.Random(seed * 1_000_003 + n)) for n, make in enumerate(kinds)]  # type: ignore[misc]
