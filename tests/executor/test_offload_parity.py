"""Cold, warm, and offloaded and brought back: the same greedy tokens, on the embedded model and on MiniMax-M3."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from tests.executor.gpu.random_model import random_minimax_m3

from longturn.assemble import build_engine
from longturn.config import PAGE_TOKENS, CacheConfig, EngineConfig, ExecutorConfig, ModelConfig, SchedulerConfig
from longturn.engine.clock import SystemClock
from longturn.engine.hashing import page_hashes
from longturn.engine.loop import Engine
from longturn.engine.records import EngineRequest, SamplingParams, pack_tokens
from longturn.errors import ConfigError, ModelError
from longturn.executor.cpu import CpuExecutor
from longturn.executor.cpu_offload import cpu_offload
from longturn.executor.torch_model import TorchCpuModel
from longturn.models.make_checkpoint import Preset, preset_config
from longturn.models.minimax_m3_config import minimax_m3_config
from longturn.source import resolve_source

KEY = b"k" * 32
PAGES = 8
Run = Callable[[str, list[int], int], tuple[tuple[int, ...], int]]


@pytest.fixture(autouse=True)
def no_step_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A step that only waits for copies has no request that its failure would end: it is logged, and tried again."""
    yield
    assert not [record for record in caplog.get_records("call") if record.levelno >= logging.ERROR]


def runner(engine: Engine) -> Run:
    """Runs one request to its end; its tokens, and how many of its prompt were cached. Cold ones have no hashes."""

    def run(name: str, prompt: list[int], count: int) -> tuple[tuple[int, ...], int]:
        packed = pack_tokens(prompt)
        sampling = SamplingParams(count, temperature=0.0)
        hashes = () if name == "cold" else page_hashes(packed, KEY)
        engine.add(EngineRequest(name, packed, hashes, sampling, hash_key=KEY if hashes else b""))
        tokens: list[int] = []
        cached = 0
        while engine.has_work():
            step = engine.step()
            for output in step.outputs if step is not None else ():
                assert output.error is None, output.error
                tokens += output.token_ids
                cached = output.cached_tokens
        engine.check_invariants()
        return tuple(tokens), cached

    return run


def agree(engine: Engine, vocab: int) -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(vocab) for _ in range(2 * PAGE_TOKENS + 20)]
    run = runner(engine)
    try:
        cold, nothing = run("cold", prompt, 12)
        first, _ = run("first", prompt, 12)
        warm, all_of_it = run("warm", prompt, 12)
        assert (nothing, all_of_it) == (0, 2 * PAGE_TOKENS) and cold == first == warm
        run("filler", [rng.randrange(vocab) for _ in range((PAGES - 1) * PAGE_TOKENS - 4)], 2)
        loaded = engine.stats().loaded_pages
        back, from_host = run("back", prompt, 12)
        assert engine.stats().loaded_pages == loaded + 2 and from_host == 2 * PAGE_TOKENS
        assert back == cold
        # A later turn, after its pages have left the device again.
        run("other filler", [rng.randrange(vocab) for _ in range((PAGES - 1) * PAGE_TOKENS - 4)], 2)
        longer = [*prompt, *cold, *(rng.randrange(vocab) for _ in range(PAGE_TOKENS))]
        turn, from_host = run("turn", longer, 8)
        assert engine.stats().loaded_pages == loaded + 4 and from_host == 2 * PAGE_TOKENS
        assert turn == run("cold", longer, 8)[0]
    finally:
        engine.close()
    assert len(set(cold)) > 1


def test_pages_from_host_memory_give_the_same_answer_sglang_38031() -> None:
    try:
        resolve_source(ModelConfig())
    except ModelError as error:
        pytest.skip(str(error))
    page_bytes = 128 * 30 * 2 * 3 * 64 * 2
    config = EngineConfig(
        model=ModelConfig(max_context_tokens=2048),
        cache=CacheConfig(memory_bytes=PAGES * page_bytes, host_memory_bytes=40 * page_bytes + 5, dtype="fp16"),
        scheduler=SchedulerConfig(step_tokens=512, target_itl_ms=0.0),
        executor=ExecutorConfig(device="cpu"),
    )
    engine = build_engine(config)
    assert engine.executor.info.host_pages == 40
    agree(engine, 40_000)
    with pytest.raises(ConfigError, match=r"cache\.host_memory_bytes.*too small for one page of"):
        build_engine(replace(config, cache=replace(config.cache, host_memory_bytes=1000)))


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_index_keys_come_back_from_host_memory_too_sglang_38031(kv_dtype: torch.dtype) -> None:
    """Its pages have index keys, and it attends to chosen blocks alone: a lane left behind would show."""
    preset = Preset(
        hidden=128, layers=3, heads=2, kv_heads=1, head_dim=128, rotary_dim=64, index_dim=128, top_blocks=2,
        dense_ffn=128, expert_ffn=64, experts=8, top_experts=2, vocab_size=256, context=4096,
    )  # fmt: skip
    config = minimax_m3_config(preset_config(preset)["text_config"])
    model = random_minimax_m3(config, dtype=torch.float32, device="cpu", seed=3)
    if kv_dtype != torch.float32:
        from longturn.models.minimax_m3_cache import minimax_m3_kv

        model = replace(model, kv=minimax_m3_kv(config, kv_dtype))
    on_cpu = TorchCpuModel(model, pages=PAGES, max_context_tokens=2048, threads=1)
    executor = CpuExecutor(on_cpu, rows=2, offload=cpu_offload(on_cpu.storage, 40))
    scheduler = SchedulerConfig(max_running=2, step_tokens=512, target_itl_ms=0.0, expected_output_tokens=1)
    agree(Engine(executor, scheduler, CacheConfig(), SystemClock()), 256)
