"""`bench quality` on a tiny random model, where fp32 against itself must differ by exactly nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longturn.bench.quality import compare_logits
from longturn.cli.main import main
from longturn.cli.quality import command_of, side_config
from longturn.errors import ConfigError
from longturn.executor.rows import StepInputs
from longturn.report.point import Engine, Model, load_point, save_point
from longturn.report.quality import QualityResult, load_quality
from tests.report.points import point

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from longturn.bench.texts import NamedText  # noqa: E402
from longturn.cli import quality_run  # noqa: E402
from longturn.cli.quality_result import stored_format  # noqa: E402
from longturn.cli.quality_run import Pair, Plan, fair_shares, greedy_answers  # noqa: E402
from longturn.kernels.cpu.library import unavailable_reason  # noqa: E402
from longturn.models.inspect import FormatSize  # noqa: E402
from longturn.models.small_tokenizer import special_ids, write_tokenizer  # noqa: E402

VOCAB = 1024
TEXT = "def add(first, second):\n    return first + second\n\nThe cache keeps what was used last.\n" * 12


@pytest.fixture(scope="module", autouse=True)
def threads_as_before() -> Iterator[None]:
    """The verb sets how many threads torch uses."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    ids = special_ids(VOCAB)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=ids["bos_token_id"],
        eos_token_id=ids["eos_token_id"],
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    write_tokenizer(path, VOCAB)
    (path.parent / "text.md").write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def needs_kernels() -> None:
    if (reason := unavailable_reason()) is not None:
        pytest.skip(reason)


def measure(checkpoint: Path, out: Path, a: str, b: str, *more: str) -> QualityResult:
    """Through the command line; the page pool is small, since this model's pages are."""
    small = "threads=1,memory_bytes=4MiB"
    argv = ["bench", "quality", "--model", str(checkpoint), "--a", f"{a},{small}", "--b", f"{b},{small}"]
    argv += ["--text", str(checkpoint.parent / "text.md"), "--window", "150", "--answer-tokens", "12"]
    assert main([*argv, "--out", str(out), *more]) == 0
    return load_quality(out)


def test_fp32_against_itself_is_exactly_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = measure(checkpoint, tmp_path / "q.json", "weights=fp32", "weights=fp32", "--positions", "200")
    whole = result.whole
    assert whole.positions == 200
    assert (whole.perplexity_delta, whole.top1_agreement, whole.kl.mean, whole.kl.max) == (0.0, 1.0, 0.0, 0.0)
    assert 100 < whole.reference_perplexity < 20 * VOCAB
    assert all(prompt.same and prompt.agreed_tokens == prompt.reference_tokens for prompt in result.prompts)
    assert len(result.prompts) == 8
    assert result.candidate.resolved == {"model.weights": "fp32", "cache.dtype": "fp32"}
    assert result.candidate.model.quantisation == "fp32"
    shown = capsys.readouterr().out
    assert "8 of 8 answers are the same to the end" in shown
    assert "text.md" in shown
    for data in (shown, result.command, (tmp_path / "q.json").read_text()):
        assert str(checkpoint.parent) not in data


def test_perplexity_is_transformers_own(checkpoint: Path, tmp_path: Path) -> None:
    """An oracle for the way from text to figure: windows, targets, chunks."""
    from longturn.config import ModelConfig
    from longturn.frontend.tokenizer import load_tokenizer
    from longturn.source import resolve_source

    result = measure(checkpoint, tmp_path / "q.json", "weights=fp32", "weights=fp32", "--answer-tokens", "0")
    assert result.prompts == ()
    ids = load_tokenizer(resolve_source(ModelConfig(path=str(checkpoint)))).encode(TEXT)
    assert len(ids) > 300, "the text must fill more than two windows"
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    losses = []
    for at in range(0, len(ids), 150):
        window = torch.tensor([ids[at : at + 150]])
        with torch.no_grad():
            logits = model(window).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="none"))
    loss = torch.cat(losses)
    assert result.whole.positions == len(loss)
    assert result.whole.reference_perplexity == pytest.approx(float(loss.double().mean().exp()), rel=1e-4)


def test_packed_against_fp32_is_little(checkpoint: Path, tmp_path: Path, needs_kernels: None) -> None:
    result = measure(checkpoint, tmp_path / "q.json", "weights=fp32", "weights=packed", "--positions", "200")
    assert 0 < result.whole.kl.mean < 1e-3
    assert result.whole.kl.mean < result.whole.kl.max
    assert 0 < abs(result.whole.perplexity_delta) < 0.02
    assert 0.9 < result.whole.top1_agreement <= 1
    assert result.candidate.resolved == {"model.weights": "packed", "cache.dtype": "fp16"}
    assert result.candidate.automatic["model.weights"] == "fp32"
    assert result.candidate.model.quantisation == "q8_0"
    again = measure(checkpoint, tmp_path / "r.json", "weights=fp32", "weights=packed", "--positions", "200")
    assert (again.whole, again.prompts, again.text_digest) == (result.whole, result.prompts, result.text_digest)


def test_attach(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "q.json"
    result = measure(checkpoint, out, "weights=fp32", "weights=fp32", "--positions", "20", "--answer-tokens", "0")
    own: dict[str, Any] = {"engine": Engine(name="longturn", version="0.1.0"), "flags": {}, "quality": None}
    good = point("c", 1, 10.0, 5.0, **own, model=Model(name="tiny", quantisation="fp32"))
    other = point("c", 2, 10.0, 5.0, **own, model=Model(name="tiny", quantisation="bf16"))
    points = tmp_path / "points"
    save_point(good, points / "1.json")
    save_point(other, points / "2.json")
    (points / "notes.json").write_text("{}")
    capsys.readouterr()
    # One does not fit: nothing is written.
    assert main(["bench", "quality", "--from", str(out), "--attach", str(points)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "2.json: another configuration: quantisation is 'bf16', the quality is of 'fp32'" in error
    assert load_point(points / "1.json") == good
    (points / "2.json").unlink()
    assert main(["bench", "quality", "--from", str(out), "--attach", str(points)]) == 0
    assert "attached to 1 point\n" in capsys.readouterr().out
    quality = load_point(points / "1.json").quality
    assert quality is not None
    assert (quality.reference, quality.mean_kl) == (result.reference.label, 0.0)


def test_a_partial_result_is_shown_but_not_attached(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "q.json"
    measure(checkpoint, out, "weights=fp32", "weights=fp32", "--positions", "10", "--answer-tokens", "0")
    out.write_text(json.dumps({**json.loads(out.read_text()), "partial": True}))
    own: dict[str, Any] = {"engine": Engine(name="longturn", version="0.1.0"), "flags": {}, "quality": None}
    save_point(point("c", 1, 10.0, 5.0, **own, model=Model(name="tiny", quantisation="fp32")), tmp_path / "p.json")
    assert main(["bench", "quality", "--from", str(out)]) == 0
    assert "partial: interrupted" in capsys.readouterr().out
    assert main(["bench", "quality", "--from", str(out), "--attach", str(tmp_path / "p.json")]) == 2
    assert load_point(tmp_path / "p.json").quality is None


def test_ctrl_c_saves_a_partial_result(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = iter(range(100))

    def slow(*arrays: Any) -> Any:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return compare_logits(*arrays)

    monkeypatch.setattr(quality_run, "compare_logits", slow)
    small = "threads=1,memory_bytes=4MiB,weights=fp32"
    out = tmp_path / "q.json"
    argv = ["bench", "quality", "--model", str(checkpoint), "--a", small, "--b", small, "--out", str(out)]
    assert main([*argv, "--window", "100"]) == 130
    assert (load_quality(out).partial, load_quality(out).whole.positions) == (True, 64)
    assert "the result is partial" in capsys.readouterr().err
    out.unlink()
    calls = iter([1])
    assert main([*argv, "--window", "100"]) == 130
    assert not out.exists()


def test_json_is_the_record(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "q.json"
    measure(checkpoint, out, "weights=fp32", "weights=fp32", "--positions", "10", "--answer-tokens", "0", "--json")
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())


@pytest.mark.parametrize(
    ("formats", "name"),
    [
        ([("q4_1", 106_000, 66_000), ("q8_0", 28_000, 30_000), ("f32", 35, 140)], "q4_1"),
        ([("bf16", 260_000, 520_000), ("nvfp4", 200_000, 112_000), ("mxfp8", 150_000, 155_000)], "nvfp4"),
        ([("bf16", 950, 1900), ("nvfp4", 50, 28)], "bf16"),
        ([("f32", 10, 40)], "fp32"),
    ],
)
def test_a_mixed_checkpoint_goes_by_one_name(formats: list[tuple[str, int, int]], name: str) -> None:
    assert stored_format([FormatSize(form, 1, count, size) for form, count, size in formats]) == name


# --- parts -----------------------------------------------------------------------------------------------------------


class CountingModel:
    """Its next token is (sum of the sequence + its length) modulo 47, read back from the pages that steps wrote."""

    def __init__(self, pages: int) -> None:
        self.vocab_size, self.max_context_tokens, self.pages, self.page_bytes = 50, 4096, pages, 1
        self.description = "counting"
        self._cache = np.full((pages, 128), -1, np.int64)
        self.most_rows = 0

    def greedy(self, inputs: StepInputs) -> Any:
        rows = np.repeat(inputs.rows, np.diff(inputs.query_starts))
        self.most_rows = max(self.most_rows, len(set(rows.tolist())))
        for token, position, row in zip(inputs.tokens, inputs.positions, rows, strict=True):
            page = inputs.page_tables[row, position // 128]
            assert page != 0, "the null page is nobody's"
            self._cache[page, position % 128] = token
        found = []
        for index in inputs.sample_index:
            row, end = rows[index], int(inputs.positions[index]) + 1
            total = sum(self._cache[inputs.page_tables[row, p // 128], p % 128] for p in range(end))
            found.append((total + end) % 47)
        return np.array(found, np.int32)

    def logits(self, inputs: StepInputs) -> Any:
        raise NotImplementedError

    def close(self) -> None: ...


@pytest.mark.parametrize("pages", [100, 15, 8])
def test_greedy_answers_of_prompts_together(pages: int) -> None:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 50, length).tolist() for length in (1, 127, 128, 600, 3, 300)]
    ends = frozenset({7, 19})

    def alone(prompt: list[int]) -> list[int]:
        sequence = list(prompt)
        while len(sequence) < len(prompt) + 40 and not (len(sequence) > len(prompt) and sequence[-1] in ends):
            sequence.append((sum(sequence) + len(sequence)) % 47)
        return sequence[len(prompt) :]

    model = CountingModel(pages)
    answers = greedy_answers(model, prompts, 40, ends)
    assert answers == [alone(prompt) for prompt in prompts]
    assert model.most_rows == {100: 5, 15: 2, 8: 1}[pages]  # one answer ends with its first token
    assert {len(answer) for answer in answers} != {40}, "some answer must end by itself"


def test_a_pool_that_holds_no_prompt() -> None:
    with pytest.raises(ConfigError, match=r"cache\.memory_bytes holds less than one sequence of 340 tokens"):
        greedy_answers(CountingModel(3), [[1] * 300], 40, frozenset())


@pytest.mark.parametrize(
    ("lengths", "total", "shares"),
    [
        ([10, 10, 10], 30, [10, 10, 10]),
        ([10, 10, 10], 9, [3, 3, 3]),
        ([2, 100, 50], 62, [2, 30, 30]),
        ([100, 5, 20], 1000, [100, 5, 20]),
        ([5, 5], 1, [0, 1]),
        ([], 5, []),
    ],
)
def test_fair_shares(lengths: list[int], total: int, shares: list[int]) -> None:
    assert fair_shares(lengths, total) == shares


def test_ctrl_c_keeps_what_is_whole(checkpoint: Path) -> None:
    class Impatient:
        calls = 0

        def waiting(self, text: str) -> None: ...

        def tick(self) -> None:
            self.calls += 1
            if self.calls == 3:
                raise KeyboardInterrupt

    sides = [side_config(str(checkpoint), ["weights=fp32", "threads=1,memory_bytes=4MiB"], flag) for flag in "ab"]
    pair = Pair(*sides)
    plan = Plan((NamedText("t", TEXT), NamedText("u", TEXT)), (), 1000, 200, 8)
    outcome = pair.measure(plan, Impatient())
    pair.close()
    assert outcome.interrupted
    assert {name: len(scores.kl) for name, scores in outcome.texts.items()} == {"t": 3 * 64}


def test_settings_by_short_and_full_name() -> None:
    config = side_config("models/x", ["weights=packed, cache.dtype=fp16", "model.max_context_tokens=256"], "--a")
    assert (config.model.path, config.model.weights, config.cache.dtype) == ("models/x", "packed", "fp16")
    assert config.model.max_context_tokens == 256
    assert side_config("models/x", ["path=models/y"], "--a").model.path == "models/y"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--a", "wieghts=fp32"], "--a: unknown setting 'wieghts'"),
        (["--b", "weights"], "--b needs NAME=VALUE, not 'weights'"),
        (["--b", "weights=int3"], "'model.weights' must be one of"),
        (["--positions", "0"], "--positions must be at least 1"),
        (["--window", "1"], "--window must be at least 2"),
        (["--answer-tokens", "-1"], "--answer-tokens must be at least 0"),
        (["--text", "no/such.txt"], "no/such.txt: No such file"),
        (["--from", "no/such.json"], "no/such.json: No such file"),
        (["--from", "x.json", "--a", "weights=fp32"], "--a is for a measurement"),
        (["--out", "/dev/null/x/q.json"], "cannot write to /dev/null/x"),
    ],
)
def test_wrong_usage_is_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "quality", *argv]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_models_that_cannot_be_compared(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = "threads=1,memory_bytes=4MiB,weights=fp32"
    argv = ["bench", "quality", "--model", str(checkpoint), "--a", small, "--b", small]
    assert main([*argv, "--window", "600"]) == 2
    assert "--window 600 is more than the context of 512 tokens" in capsys.readouterr().err
    assert main([*argv, "--answer-tokens", "500"]) == 2
    assert "do not fit into the context of 512" in capsys.readouterr().err
    assert main([*argv[:-1], f"{small},model.path={checkpoint}-2"]) == 3
    assert "no such model file or directory" in capsys.readouterr().err


def test_the_command_names_no_folder() -> None:
    import argparse

    args = argparse.Namespace(
        model="/home/me/models/x", a=["weights=fp32,path=/home/me/y"], b=None, text=["/home/me/t.md"], prompts=None,
        positions=500, window=1024, answer_tokens=64,
    )  # fmt: skip
    assert command_of(args) == (
        "longturn bench quality --model x --a weights=fp32,path=y --b weights=packed --text t.md --positions 500"
    )


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom longturn.cli.main import main\n"
        "try:\n    main(['bench', 'quality', '--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not set(sys.modules) & {'torch', 'numpy', 'msgspec', 'yaml', 'tokenizers'}"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "usage: longturn bench quality" in shown.stdout
