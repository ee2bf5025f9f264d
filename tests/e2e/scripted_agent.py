"""`longturn serve` on a model that follows a script: the real server, engine, prefix cache, template, tokenizer and
parsers, with an executor that writes what it was told to instead of computing. It lets a real agent work for many turns
without weights.

    python -m tests.e2e.scripted_agent FOLDER minimax_m3|qwen SCRIPTS.json [SETTINGS.json]

SCRIPTS maps names to answers, in order. A prompt chooses its script by the last `@script:NAME@` in it, and the answer
by the number of answers behind that; without a known script it gets the one named `default`. A script's last answer is
repeated.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longturn.config import EngineConfig, config_from_dict
from longturn.engine.clock import SystemClock
from longturn.engine.loop import Engine
from longturn.engine.protocols import ExecutorInfo
from longturn.engine.records import NewRow, RowResult, StepPlan, StepResult, unpack_tokens
from longturn.frontend.tokenizer import Tokenizer, load_tokenizer
from longturn.models.small_tokenizer import small_tokenizer, special_ids, write_tokenizer
from longturn.server.run import serve
from longturn.source import resolve_source

FACTORY = "tests.e2e.scripted_agent:build"
CONTEXT = 1 << 19
PAGES = 1 << 13
VOCABULARY = 1024
SCRIPTS = "scripts.json"
MARK = "@script:"


@dataclass(frozen=True)
class Answer:
    """What the model says in one turn."""

    text: str = ""
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    reasoning: str = ""


# --- how two families write ------------------------------------------------------------------------------------------

# As Qwen3's: tools in the system message, reasoning of the answers behind the last question, results in a user turn.
QWEN_TEMPLATE = r"""
{%- set first = messages[0] %}
{%- if tools %}
  {{- '<|im_start|>system\n' ~ (first.content ~ '\n\n' if first.role == 'system' else '') }}
  {{- '# Tools\n\nWithin <tools></tools>:\n<tools>' }}
  {%- for tool in tools %}{{ '\n' ~ (tool | tojson) }}{% endfor %}
  {{- '\n</tools>\n\nA call:\n<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n' }}
{%- elif first.role == 'system' %}
  {{- '<|im_start|>system\n' ~ first.content ~ '<|im_end|>\n' }}
{%- endif %}
{%- set asked = namespace(at=0) %}
{%- for m in messages if m.role == 'user' %}{% set asked.at = messages.index(m) %}{% endfor %}
{%- for m in (messages[1:] if first.role == 'system' else messages) %}
  {%- set at = loop.index0 + (1 if first.role == 'system' else 0) %}
  {%- if m.role == 'tool' %}
    {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
    {{- '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}
    {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
  {%- else %}
    {{- '<|im_start|>' ~ m.role ~ '\n' }}
    {%- if m.role == 'assistant' and m.reasoning_content and at > asked.at %}
      {{- '<think>\n' ~ m.reasoning_content.strip('\n') ~ '\n</think>\n\n' }}
    {%- endif %}
    {{- m.content }}
    {%- for call in m.tool_calls or [] %}
      {{- '\n' if m.content or not loop.first }}
      {{- '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
      {{- call.function.arguments | tojson ~ '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\n' }}
  {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}""".lstrip()


@dataclass(frozen=True)
class Family:
    """How a model writes, from its own side."""

    architecture: str
    turn: str
    """What an answer stands behind."""
    end: str
    opening: str
    closing: str
    gap: str
    """Between reasoning and answer."""
    tag: str | None
    """What MiniMax-M3 puts before each tag of its calls; None writes calls as Qwen3."""

    def written(self, answer: Answer, prompt: str) -> str:
        """The answer as the model writes it behind `prompt`."""
        text = answer.text + self.calls(answer)
        if prompt.rstrip().endswith(self.closing):
            return text
        if prompt.rstrip().endswith(self.opening):
            return answer.reasoning + self.closing + self.gap + text
        return f"{self.opening}{answer.reasoning}{self.closing}{self.gap}{text}" if answer.reasoning else text

    def calls(self, answer: Answer) -> str:
        if not answer.calls:
            return ""
        if self.tag is None:
            objects = [{"name": name, "arguments": arguments} for name, arguments in answer.calls]
            blocks = [f"<tool_call>\n{json.dumps(made, ensure_ascii=False)}\n</tool_call>" for made in objects]
            return ("\n" if answer.text else "") + "\n".join(blocks)
        tag, calls = self.tag, ""
        for name, arguments in answer.calls:
            calls += f'{tag}<invoke name="{name}">{_elements(arguments, tag)}{tag}</invoke>\n'
        return f"\n{tag}<tool_call>\n{calls}{tag}</tool_call>"


FAMILIES: Mapping[str, Family] = {
    "minimax_m3": Family(
        "MiniMaxM3SparseForCausalLM", "]~b]ai\n", "[e~[", "<mm:think>", "</mm:think>", "", "]<]minimax[>["
    ),
    "qwen": Family("Qwen3ForCausalLM", "<|im_start|>assistant\n", "<|im_end|>", "<think>", "</think>", "\n\n", None),
}


def _elements(value: Any, tag: str) -> str:
    if isinstance(value, Mapping):
        return "".join(f"{tag}<{key}>{_elements(item, tag)}{tag}</{key}>" for key, item in value.items())
    if isinstance(value, list):
        return "".join(f"{tag}<item>{_elements(item, tag)}{tag}</item>" for item in value)
    return value if isinstance(value, str) else json.dumps(value)


def write_model(directory: Path, family: str, scripts: Mapping[str, Sequence[Answer]]) -> None:
    """A directory that `longturn serve` takes for a model: settings, tokenizer, chat template, and the scripts, which
    are read anew for every request."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory, VOCABULARY)
    eos: int | None = special_ids(VOCABULARY)["eos_token_id"]
    if family == "qwen":
        tokenizer = small_tokenizer(VOCABULARY)
        tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
        tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "chat_template.jinja").write_text(QWEN_TEMPLATE)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        eos = tokenizer.token_to_id("<|im_end|>")
    config = {
        "architectures": [FAMILIES[family].architecture],
        "vocab_size": VOCABULARY + 8,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": eos,
        "family": family,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").touch()
    entries = {name: [dataclasses.asdict(answer) for answer in answers] for name, answers in scripts.items()}
    (directory / SCRIPTS).write_text(json.dumps(entries))


def read_scripts(path: Path) -> dict[str, list[Answer]]:
    """The scripts of a file."""
    return {
        name: [
            Answer(a.get("text", ""), tuple((c[0], c[1]) for c in a.get("calls", ())), a.get("reasoning", ""))
            for a in answers
        ]
        for name, answers in json.loads(path.read_text()).items()
    }


# --- the executor ----------------------------------------------------------------------------------------------------


@dataclass
class _Row:
    prompt_tokens: int
    answer: list[int]


@dataclass
class _Step:
    finished: StepResult

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self.finished


@dataclass
class ScriptedExecutor:
    """Samples the tokens of the answer that the prompt's script has next, then the end token."""

    folder: Path
    family: Family
    tokenizer: Tokenizer
    info: ExecutorInfo
    _rows: dict[int, _Row] = field(default_factory=dict)

    def launch(self, plan: StepPlan) -> _Step:
        for freed in plan.freed_rows:
            self._rows.pop(freed, None)
        for new in plan.new_rows:
            self._rows[new.row] = self._begin(new)
        results = []
        for work in plan.work:
            if work.samples:
                row = self._rows[work.row]
                at = work.start + work.count - row.prompt_tokens
                results.append(RowResult(work.row, (row.answer[min(at, len(row.answer) - 1)],)))
        return _Step(StepResult(plan.step_id, tuple(results)))

    def close(self) -> None:
        self._rows.clear()

    def _begin(self, new: NewRow) -> _Row:
        prompt = self.tokenizer.decode(unpack_tokens(new.tokens)[: new.prompt_tokens], skip_special_tokens=False)
        text = self.family.written(self.answer(prompt), prompt) + self.family.end
        return _Row(new.prompt_tokens, self.tokenizer.encode(text))

    def answer(self, prompt: str) -> Answer:
        """The answer to a rendered prompt."""
        scripts = read_scripts(self.folder / SCRIPTS)
        before, _, behind = prompt.rpartition(MARK)
        name, number = "default", 0
        if before:
            name, number = behind.partition("@")[0], behind.count(self.family.turn) - 1
        answers = scripts.get(name, scripts["default"])
        return answers[min(number, len(answers) - 1)]


def build(config: EngineConfig) -> Engine:
    """The engine process's factory."""
    source = resolve_source(config.model)
    family = FAMILIES[source.config["family"]]
    info = ExecutorInfo(
        rows=config.scheduler.max_running, pages=PAGES, page_bytes=1, max_context_tokens=source.max_context_tokens,
        vocab_size=source.vocab_size, device="script",
    )  # fmt: skip
    executor = ScriptedExecutor(source.path, family, load_tokenizer(source), info)
    return Engine(executor, config.scheduler, config.cache, SystemClock())


def main(arguments: Sequence[str]) -> None:
    folder, family, scripts, *settings = arguments
    write_model(Path(folder), family, read_scripts(Path(scripts)))
    tree = json.loads(Path(settings[0]).read_text()) if settings else {}
    tree["model"] = {**tree.get("model", {}), "path": folder}
    serve(config_from_dict(EngineConfig, tree), engine_factory=FACTORY)


if __name__ == "__main__":
    main(sys.argv[1:])
