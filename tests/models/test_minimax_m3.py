"""MiniMax-M3 against transformers on a tiny random checkpoint, for every way a scheduler may cut the work."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from minimax_m3_oracle import LAYERS, TEXT, change_config, expected, largest, make_oracle, tokens
from paged_runner import PagedRunner
from safetensors import safe_open
from safetensors.torch import save_file

from longturn.config import ModelConfig
from longturn.errors import ModelError
from longturn.models.base import CausalModel
from longturn.models.registry import load_model
from longturn.ops.kv_lane import FP8, NVFP4
from longturn.source import resolve_source

pytest.importorskip("transformers", minversion="5.24")

CONTEXTS = (1, 127, 128, 129, 2047, 2048, 2049, 6000)
LONGEST = max(CONTEXTS)


@dataclass
class Case:
    path: Path
    model: CausalModel
    ids: list[int]
    want: torch.Tensor
    """The oracle's logits at every position of `ids`."""

    def runner(self, tokens: int, *, rows: int = 1, seed: int = 0) -> Runner:
        return Runner(self.model, rows=rows, max_tokens=tokens, seed=seed)


class Runner(PagedRunner):
    def share(self, source: int, target: int, pages: int) -> None:
        """Give row `target` the first pages of row `source`, as a prefix-cache hit does."""
        self._tables[target, :pages] = self._tables[source, :pages]
        self.lengths[target] = 128 * pages

    def lane_bytes(self, row: int, page: int, layer: int, lane: str) -> torch.Tensor:
        names = [item.name for item in self.model.kv.layers[layer]]
        return self.model.kv.view(self.cache, layer, names.index(lane))[int(self._tables[row, page])].view(torch.uint8)


def load(path: Path, **options: Any) -> CausalModel:
    return load_model(resolve_source(ModelConfig(path=str(path))), **options)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tmp_path_factory.mktemp("m3")
    oracle = make_oracle(path)
    ids = tokens(LONGEST, seed=1)
    want = expected(oracle, ids)
    assert float(want.std()) > 0.5, "the oracle must have something to say"
    return Case(path, load(path), ids, want)


@pytest.mark.parametrize("context", CONTEXTS)
def test_whole_prefill(case: Case, context: int) -> None:
    got = case.runner(context).step({0: case.ids[:context]})[0]
    assert largest(got, case.want[:context]) < 1e-4


def test_the_oracle_at_a_context_is_the_longer_one_cut(case: Case) -> None:
    """So that one run of the oracle serves all contexts."""
    oracle = make_oracle(case.path.parent / "again")
    assert largest(expected(oracle, case.ids[:700]), case.want[:700]) < 1e-4


def test_blocks_are_left_out(case: Case, tmp_path: Path) -> None:
    """The tests above would mean nothing if every block were chosen: choosing more changes the logits."""
    for file in case.path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change_config(tmp_path, {"index_topk_blocks": 5})
    got = Runner(load(tmp_path), rows=1, max_tokens=900).step({0: case.ids[:900]})[0]
    assert largest(got[:512], case.want[:512]) < 1e-4
    assert largest(got[640:], case.want[640:900]) > 0.1


@pytest.mark.parametrize("cut", [1, 2, 127, 128, 129, 255, 256, 257, 384, 511, 512, 513, 514, 640, 700, 891, 899])
def test_prefill_in_two_chunks(case: Case, cut: int) -> None:
    runner = case.runner(900, seed=cut)
    parts = [runner.step({0: case.ids[:cut]})[0], runner.step({0: case.ids[cut:900]})[0]]
    assert largest(torch.cat(parts), case.want[:900]) < 1e-4


@pytest.mark.parametrize("seed", range(3))
def test_prefill_in_random_chunks(case: Case, seed: int) -> None:
    rng = random.Random(seed)
    runner = case.runner(LONGEST, seed=seed)
    while (at := runner.lengths[0]) < LONGEST:
        chunk = case.ids[at : at + rng.choice((1, 7, 9, 100, 128, 256, 512, 900))]
        assert largest(runner.step({0: chunk})[0], case.want[at : at + len(chunk)]) < 1e-4


@pytest.mark.parametrize("start", [120, 505, 2040, LONGEST - 20])
def test_decode(case: Case, start: int) -> None:
    runner = case.runner(LONGEST)
    runner.step({0: case.ids[:start]})
    for position in range(start, start + 20):  # across a page border, or to the end
        got = runner.step({0: case.ids[position : position + 1]})[0]
        assert largest(got, case.want[position : position + 1]) < 1e-4


@pytest.mark.parametrize("pages", [1, 4, 5, 16])
def test_cached_pages_give_what_a_cold_run_gives(case: Case, pages: int) -> None:
    total = 128 * pages + 200
    runner = case.runner(total, rows=2)
    cold = runner.step({0: case.ids[:total]})[0]
    runner.share(0, 1, pages)
    warm = runner.step({1: case.ids[128 * pages : total]})[1]
    assert largest(warm, cold[128 * pages :]) < 1e-5
    assert largest(warm, case.want[128 * pages : total]) < 1e-4


def test_cold_and_warm_generation_agree(case: Case) -> None:
    runner = case.runner(900, rows=2)
    cold = runner.greedy(0, case.ids[:800], 16)
    runner.share(0, 1, 6)
    assert runner.greedy(1, case.ids[768:800], 16) == cold


def test_mixed_steps(case: Case) -> None:
    """Random steps over several rows: decodes, chunks and first prefills beside each other."""
    rng = random.Random(3)
    lengths = [rng.choice((1, 90, 400, 700, 1000)) for _ in range(5)]
    runner = case.runner(1000, rows=5)
    while left := [row for row in range(5) if runner.lengths[row] < lengths[row]]:
        work = {}
        for row in rng.sample(left, rng.randint(1, len(left))):
            at = runner.lengths[row]
            work[row] = case.ids[at : min(at + rng.choice((1, 1, 2, 60, 128, 300)), lengths[row])]
        before = list(runner.lengths)
        for row, logits in runner.step(work).items():
            assert largest(logits, case.want[before[row] : runner.lengths[row]]) < 1e-4


@pytest.mark.parametrize("kv_dtype", [torch.float32, NVFP4])
def test_a_poisoned_index_lane_changes_the_output(case: Case, kv_dtype: torch.dtype) -> None:
    """A path that moves keys and values and forgets the index key must be noticed."""
    model = load(case.path, kv_dtype=kv_dtype)
    sparse = [layer for layer in range(LAYERS) if TEXT["layer_types"][layer] != "full_attention"]
    outputs = []
    for poison in (False, True):
        runner = Runner(model, rows=2, max_tokens=1100)
        runner.step({0: case.ids[:1000]})
        if poison:
            other = [runner.lane_bytes(0, 6, layer, "index_key").clone() for layer in sparse]
            for layer, content in zip(sparse, other, strict=True):
                runner.lane_bytes(0, 2, layer, "index_key").copy_(content)
                runner.lane_bytes(0, 6, layer, "index_key").zero_()
        runner.share(0, 1, 7)
        outputs.append(runner.step({1: case.ids[896:1000]})[1])
    assert largest(*outputs) > 1e-2


def test_bf16_stays_close(tmp_path: Path) -> None:
    """bf16 rounds at each operation, and where two experts or blocks score alike, rounding decides which one is taken.

    Either implementation then goes its own way, so at such positions only the distance to fp32 can be compared. At the
    end of each context, for this seed, and at most other positions both must agree.
    """
    oracle = make_oracle(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        oracle.lm_head.weight *= 0.2  # logits of about 0.3, for which 0.02 is the rounding of bf16
    oracle.save_pretrained(tmp_path)
    ids = tokens(LONGEST, seed=5)
    want = expected(oracle, ids)
    got = Runner(load(tmp_path, dtype=torch.bfloat16), rows=1, max_tokens=LONGEST).step({0: ids})[0]
    exact = Runner(load(tmp_path), rows=1, max_tokens=LONGEST).step({0: ids})[0]
    for context in CONTEXTS:
        at = slice(context - 1, context)
        assert largest(got[at], want[at]) < 2e-2, context
        assert torch.equal(got[at].argmax(-1), want[at].argmax(-1)), context
    apart = (got - want).abs().amax(-1)
    assert float(apart.median()) < 1.2e-2
    assert float((apart < 2e-2).float().mean()) > 0.8
    ours, theirs = ((x - exact).abs().amax(-1) for x in (got, want))
    for share in (0.5, 0.9, 0.99):
        assert float(ours.quantile(share)) < 1.1 * float(theirs.quantile(share))


@pytest.mark.parametrize(
    ("kv_dtype", "bound"), [(torch.float16, 0.01), (torch.bfloat16, 0.06), (FP8, 0.4), (NVFP4, 1.0)]
)
def test_other_cache_types_stay_close(case: Case, kv_dtype: torch.dtype, bound: float) -> None:
    """Measured where every block is chosen, since rounding may swap blocks; ops/test_msa_cpu.py has the exact test."""
    model = load(case.path, kv_dtype=kv_dtype)
    runner = Runner(model, rows=1, max_tokens=900)
    got = torch.cat([runner.step({0: case.ids[:300]})[0], runner.step({0: case.ids[300:900]})[0]])
    apart = (got - case.want[:900]).abs()
    assert 0 < float(apart[:512].quantile(0.5)) < bound / 4
    assert float(apart[:512].pow(2).mean().sqrt()) < bound
    assert bool(got.isfinite().all())


def test_old_spelling_and_all_layers_sparse(tmp_path: Path) -> None:
    """The configuration as published: lists of 0 and 1, rotary_dim alone; with M3.1's sparse attention everywhere."""
    oracle = make_oracle(tmp_path, {"layer_types": ["minimax_m3_sparse"] * LAYERS})
    old = {
        "hidden_act": "swigluoai",
        "rope_theta": TEXT["rope_parameters"]["rope_theta"],
        "moe_layer_freq": [0, 1, 1],
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 48,
            "sparse_block_size": 128,
            "sparse_topk_blocks": 4,
            "sparse_local_block": 1,
            "sparse_init_block": 0,
            "sparse_score_type": "max",
            "sparse_attention_freq": [1] * LAYERS,
            "sparse_disable_index_value": [1] * LAYERS,
        },
    }
    new = ("layer_types", "mlp_layer_types", "rope_parameters", "model_type")
    new += tuple(key for key in TEXT if key.startswith("index_"))
    change_config(tmp_path, old, drop=(*new, "index_block_size", "index_local_blocks"))
    ids = tokens(900, seed=4)
    got = Runner(load(tmp_path), rows=1, max_tokens=900).step({0: ids})[0]
    assert largest(got, expected(oracle, ids)) < 1e-4


def test_text_only_directory(case: Case, tmp_path: Path) -> None:
    """Names without the prefix and a flat configuration; draft tensors are passed over too."""
    with safe_open(case.path / "model.safetensors", framework="pt") as file:
        names = [name for name in file.keys() if name.startswith("language_model.")]  # noqa: SIM118
        tensors = {name.removeprefix("language_model."): file.get_tensor(name) for name in names}
    tensors["model.mtp.layers.0.enorm.weight"] = torch.ones(4)
    tensors["model.dspark.fc.weight"] = torch.ones(4, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    text = json.loads((case.path / "config.json").read_text())["text_config"]
    text["architectures"] = ["MiniMaxM3SparseForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(text))
    got = Runner(load(tmp_path), rows=1, max_tokens=300).step({0: case.ids[:300]})[0]
    assert largest(got, case.want[:300]) < 1e-4


def test_the_oracle_checkpoint_has_vision_weights(case: Case) -> None:
    """So every test above also shows that they are passed over."""
    with safe_open(case.path / "model.safetensors", framework="pt") as file:
        assert any(name.startswith("vision_tower.") for name in file.keys())  # noqa: SIM118


def test_a_tensor_without_a_place_is_an_error(case: Case, tmp_path: Path) -> None:
    for file in case.path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change_config(tmp_path, {"layer_types": ["full_attention"] * 2 + ["minimax_m3_sparse"]})
    with pytest.raises(ModelError, match=r"no place in this architecture, first .*layers\.1\.self_attn\.index_k_norm"):
        load(tmp_path)
