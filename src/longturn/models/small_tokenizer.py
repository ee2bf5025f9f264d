"""A small real tokenizer and chat template for checkpoints with random weights.

Byte-level BPE trained on the text below, padded with words that no text encodes to, so that every row of the head has
a token and generated text can be counted. Special tokens sit at the same distance from the end as in MiniMax-M3.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from longturn.errors import ModelError
from longturn.models.checkpoint.write import write_json

LEARNED_TOKENS = 700
"""Most tokens that are learned, the 256 bytes among them."""
LEAST_VOCABULARY = 1024
_REAL_VOCABULARY = 200064


@dataclass(frozen=True, slots=True)
class _Special:
    text: str
    from_end: int
    """Vocabulary size minus its id."""
    control: bool
    """Skipped when text is decoded."""


BOS = _Special("]~!b[", _REAL_VOCABULARY - 200034, True)
EOS = _Special("[e~[", _REAL_VOCABULARY - 200020, True)
TURN = _Special("]~b]", _REAL_VOCABULARY - 200019, True)
IMAGE = _Special("]<]image[>[", _REAL_VOCABULARY - 200025, True)
VIDEO = _Special("]<]video[>[", _REAL_VOCABULARY - 200026, True)
_SPECIALS = (
    BOS, EOS, TURN, IMAGE, VIDEO,
    # Parsers look for these in the text, so they are tokens but not control tokens.
    _Special("<mm:think>", _REAL_VOCABULARY - 200050, False),
    _Special("</mm:think>", _REAL_VOCABULARY - 200051, False),
    _Special("]<]minimax[>[", _REAL_VOCABULARY - 200052, False),
)  # fmt: skip

CHAT_TEMPLATE = r"""
{%- set tag = "]<]minimax[>[" -%}
{%- macro element(value) -%}
  {%- if value is mapping -%}
    {%- for key, item in value.items() if item is not none -%}
      {{- tag ~ "<" ~ key ~ ">" ~ element(item) ~ tag ~ "</" ~ key ~ ">" -}}
    {%- endfor -%}
  {%- elif value is string -%}
    {{- value -}}
  {%- elif value is iterable -%}
    {%- for item in value -%}{{- tag ~ "<item>" ~ element(item) ~ tag ~ "</item>" -}}{%- endfor -%}
  {%- else -%}
    {{- value | tojson -}}
  {%- endif -%}
{%- endmacro -%}
{%- macro text(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content -%}
    {%- for part in content -%}
      {%- if part.type != "text" -%}{{- raise_exception("this model reads text only, not " ~ part.type) -}}{%- endif -%}
      {{- part.text -}}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set first = messages[0] if messages else none -%}
{%- set has_system = first and first.role == "system" -%}
{{- "]~!b[]~b]system\n" -}}
{{- text(first.content) if has_system else "You are a helpful assistant." -}}
{%- if reasoning_effort is defined and reasoning_effort -%}
  {{- "\n\nReasoning effort: " ~ reasoning_effort -}}
{%- endif -%}
{%- if tools -%}
  {{- "\n\n# Tools\nYou may call tools. Their JSON schemas:\n<tools>\n" -}}
  {%- for tool in tools -%}
    {{- "<tool>" ~ ((tool.function if tool.function is defined else tool) | tojson) ~ "</tool>\n" -}}
  {%- endfor -%}
  {{- "</tools>\nA call looks like this; nested values are nested elements, list entries are <item> elements:\n" -}}
  {{- tag ~ "<tool_call>\n" ~ tag ~ '<invoke name="tool">' ~ tag ~ "<key>value" ~ tag ~ "</key>" -}}
  {{- tag ~ "</invoke>\n" ~ tag ~ "</tool_call>" -}}
{%- endif -%}
{{- "[e~[\n" -}}
{%- for message in (messages[1:] if has_system else messages) -%}
  {%- if message.role == "assistant" -%}
    {{- "]~b]ai\n" -}}
    {%- if message.reasoning_content -%}{{- "<mm:think>" ~ message.reasoning_content ~ "</mm:think>" -}}{%- endif -%}
    {{- text(message.content) -}}
    {%- if message.tool_calls -%}
      {{- "\n" ~ tag ~ "<tool_call>\n" -}}
      {%- for call in message.tool_calls -%}
        {%- set call = call.function if call.function is defined else call -%}
        {{- tag ~ '<invoke name="' ~ call.name ~ '">' ~ element(call.arguments) ~ tag ~ "</invoke>\n" -}}
      {%- endfor -%}
      {{- tag ~ "</tool_call>" -}}
    {%- endif -%}
    {{- "[e~[\n" -}}
  {%- elif message.role == "tool" -%}
    {%- if loop.first or loop.previtem.role != "tool" -%}{{- "]~b]tool" -}}{%- endif -%}
    {{- "\n<response>" ~ text(message.content) ~ "</response>" -}}
    {%- if loop.last or loop.nextitem.role != "tool" -%}{{- "[e~[\n" -}}{%- endif -%}
  {%- else -%}
    {{- "]~b]" ~ message.role ~ "\n" ~ text(message.content) ~ "[e~[\n" -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- "]~b]ai\n" -}}
  {%- if thinking_mode is defined and thinking_mode == "enabled" -%}{{- "<mm:think>" -}}{%- endif -%}
{%- endif -%}
""".lstrip()

_TEXT = """
An agent works in turns. It reads the request, thinks about what to do next, calls a tool, waits for the answer, and
reads that
too. Most of what it reads in a turn it has read before: the system prompt, the list of tools, the files it has
opened, its own
earlier notes. Only the last part is new. A server that keeps the keys and values of the earlier part has little left
to do.
The file src/main.py defines a function that opens a connection, sends the message and returns the result. The test
fails because
the value is None when the list is empty. Fix the error, run the tests again, and write what you changed in the summary.
def read_lines(path: str) -> list[str]:
    with open(path, encoding="utf-8") as stream:
        return [line.rstrip() for line in stream if line.strip()]
class Cache:
    def __init__(self, size: int) -> None:
        self.size = size
        self.items: dict[str, int] = {}
    def get(self, key: str) -> int | None:
        return self.items.get(key)
for index, value in enumerate(values):
    if value is not None and value > 0:
        total += value * (index + 1)
print(f"total: {total}")
{"name": "search", "description": "Search the repository", "parameters": {"type": "object", "properties": {
"query": {"type": "string"}, "path": {"type": "string"}, "limit": {"type": "integer"}}, "required": ["query"]}}
$ git status
On branch main. Your branch is up to date. Changes not staged for commit: modified: README.md, modified:
tests/test_cache.py
$ python -m pytest -q
12 passed, 1 failed in 3.45 seconds
The weather in the harbour was clear and the ships left before noon. There were three of them, and each one carried
grain, wood and
stone from the northern islands to the towns along the coast. Nobody had expected that the smallest of them would come
back first.
Please explain how this works, step by step. First, the router chooses the experts; then their outputs are added,
weighted by the
scores; at last the shared expert is added as well. What is the difference between the first answer and the second
one? Which
of these should we use here, and why? Thank you, that is what I wanted to know. Let me check the other files before I
answer.
0 1 2 3 4 5 6 7 8 9 10 11 12 16 20 24 32 48 64 100 128 200 256 404 500 512 1000 1024 2024 2025 2026 4096
"""


def special_ids(vocab_size: int) -> dict[str, int]:
    """Ids that a configuration names, for a vocabulary of this size."""
    return {
        "bos_token_id": vocab_size - BOS.from_end,
        "eos_token_id": vocab_size - EOS.from_end,
        "image_token_index": vocab_size - IMAGE.from_end,
        "video_token_index": vocab_size - VIDEO.from_end,
    }


def small_tokenizer(vocab_size: int) -> Tokenizer:
    """The tokenizer, with a token for each id below `vocab_size`.

    Raises:
        ModelError: the vocabulary is too small.
    """
    if vocab_size < LEAST_VOCABULARY:
        raise ModelError(f"a vocabulary of {vocab_size} is too small for a tokenizer (at least {LEAST_VOCABULARY})")
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=LEARNED_TOKENS, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    learned.train_from_iterator(_TEXT.splitlines(keepends=True), trainer)
    state = json.loads(learned.to_str())["model"]
    by_id = {number: token for token, number in state["vocab"].items()}
    by_id |= {vocab_size - special.from_end: special.text for special in _SPECIALS}
    for number in range(vocab_size):
        by_id.setdefault(number, f"\u0120t{number}")  # \u0120 is how byte-level BPE spells a space
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in state["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in by_id.items()}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for special in _SPECIALS:
        token = AddedToken(special.text, special=special.control, normalized=False)
        if special.control:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
    return tokenizer


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write tokenizer.json, its settings and chat_template.jinja."""
    small_tokenizer(vocab_size).save(str(directory / "tokenizer.json"), pretty=False)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS.text,
        "eos_token": EOS.text,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
    }
    write_json(directory / "tokenizer_config.json", settings)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
