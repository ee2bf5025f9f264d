"""However a request is computed, its tokens are the same: whole, chunked, batched, cached, preempted and resumed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from longturn.assemble import build_engine
from longturn.config import PAGE_TOKENS, CacheConfig, EngineConfig, ExecutorConfig, ModelConfig, SchedulerConfig
from longturn.engine.hashing import page_hashes, salt_key
from longturn.engine.loop import Engine
from longturn.engine.records import EngineRequest, SamplingParams, pack_tokens

KEY = salt_key("agreement")
VOCABULARY = 40_000
PAGE_BYTES = {"packed": 128 * 30 * 2 * 3 * 64 * 2, "fp32": 128 * 30 * 2 * 3 * 64 * 4}


def engine(
    weights: str,
    *,
    pages: int = 64,
    path: str | None = None,
    page_bytes: int | None = None,
    threads: int | None = 1,
    **scheduler: object,
) -> Engine:
    """On one thread, since a second one waits for a core whenever other tests run beside these; None takes them all."""
    return build_engine(
        EngineConfig(
            model=ModelConfig(path=path, weights=weights, max_context_tokens=2048),  # type: ignore[arg-type]
            cache=CacheConfig(memory_bytes=pages * (page_bytes or PAGE_BYTES[weights])),
            scheduler=SchedulerConfig(**scheduler),  # type: ignore[arg-type]
            executor=ExecutorConfig(threads=threads),
        )
    )


def request(name: str, prompt: list[int], tokens: int, **sampling: object) -> EngineRequest:
    data = pack_tokens(prompt)
    params = SamplingParams(**{"max_tokens": tokens, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return EngineRequest(name, data, page_hashes(data, KEY), params, hash_key=KEY)


def run(target: Engine, requests: list[EngineRequest]) -> tuple[dict[str, list[int]], dict[str, int], int]:
    """Token ids and cached tokens of each request, and the number of preemptions."""
    for item in requests:
        target.add(item)
    tokens: dict[str, list[int]] = {item.request_id: [] for item in requests}
    cached: dict[str, int] = {}
    before = target.stats().preemptions
    while target.has_work():
        step = target.step()
        for output in step.outputs if step else ():
            assert output.error is None, output.error
            tokens[output.request_id] += output.token_ids
            cached[output.request_id] = max(cached.get(output.request_id, 0), output.cached_tokens)
    return tokens, cached, target.stats().preemptions - before


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Token soup of plausible ids; the same start for all, so that prefixes are shared."""
    rng = random.Random(seed)
    shared = [rng.randrange(100, VOCABULARY) for _ in range(length // 2)]
    return [shared + [rng.randrange(100, VOCABULARY) for _ in range(length - length // 2)] for _ in range(count)]


@pytest.mark.parametrize("weights", ["packed", "fp32"])
def test_every_way_gives_the_same_tokens(embedded_model: None, weights: str) -> None:
    texts = prompts(4, 250, seed=1)  # their answers begin in the second page and end in the third
    sampling: list[dict[str, object]] = [
        {},
        {"temperature": 0.9, "seed": 3},
        {"repetition_penalty": 1.2},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 9},
    ]
    if weights == "fp32":  # ten times as slow, and the sampler is the same
        texts, sampling = texts[:2], sampling[::3]
    length = 12

    def batch(tag: str) -> list[EngineRequest]:
        return [request(f"{tag}{i}", t, length, **s) for i, (t, s) in enumerate(zip(texts, sampling, strict=True))]

    roomy = engine(weights, step_tokens=1024, target_itl_ms=0.0)
    cold = {}
    for i, item in enumerate(batch("cold")):
        # Alone and with nothing to reuse: a salt of its own.
        alone = EngineRequest(item.request_id, item.prompt, (), item.sampling)
        cold[i] = run(roomy, [alone])[0][item.request_id]
        assert len(cold[i]) == length

    def check(tag: str, found: dict[str, list[int]]) -> None:
        for i in range(len(texts)):
            assert found[f"{tag}{i}"] == cold[i], f"{tag}, request {i}"

    first, _, _ = run(roomy, batch("batched"))
    check("batched", first)
    warm, cached, _ = run(roomy, batch("warm"))
    check("warm", warm)
    assert all(count == PAGE_TOKENS for count in cached.values())
    roomy.close()

    chunked = engine(weights, threads=None, step_tokens=37, target_itl_ms=0.0)
    found, _, _ = run(chunked, batch("chunked"))
    check("chunked", found)
    chunked.close()


def small_llama(folder: Path) -> None:
    """A checkpoint whose steps cost nothing beside the embedded model's in fp32."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).eval().save_pretrained(folder)


@pytest.mark.parametrize("weights", ["packed", "fp32"])
def test_preempted_requests_resume_with_the_same_tokens(embedded_model: None, weights: str, tmp_path: Path) -> None:
    # Two prompts of two pages that end on four each, more than admission expects; six pages are to be had.
    texts, length = prompts(2, 250, seed=2), 140
    scheduler: dict[str, object] = {"step_tokens": 256, "expected_output_tokens": 1}
    if weights == "fp32":
        small_llama(tmp_path)
        page_bytes = 128 * 2 * 2 * 2 * 16 * 4
        tight = engine(weights, pages=7, path=str(tmp_path), page_bytes=page_bytes, **scheduler)
    else:
        tight = engine(weights, pages=7, **scheduler)
    requests = [
        EngineRequest(f"{i}", pack_tokens(text), (), SamplingParams(max_tokens=length, temperature=0.5, seed=i))
        for i, text in enumerate(texts)
    ]
    together, _, preemptions = run(tight, requests)
    assert preemptions > 0, "the pool was meant to be too small"
    for item in requests:
        alone, _, again = run(tight, [item])
        assert again == 0
        assert alone[item.request_id] == together[item.request_id]
        assert len(set(alone[item.request_id])) > 8, "the model must have something to say"
    tight.close()


def test_page_bytes_are_what_this_test_assumes(embedded_model: None) -> None:
    for weights, expected in PAGE_BYTES.items():
        target = engine(weights, pages=8)
        assert target.executor.info.page_bytes == expected
        assert PAGE_TOKENS == 128
        target.close()
