"""The embedded model, read from GGUF, against transformers with the same weights."""

from __future__ import annotations

import inspect
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paged_runner import PagedRunner
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from longturn.config import ModelConfig
from longturn.errors import ModelError
from longturn.gguf_file import read_gguf
from longturn.models.base import CausalModel
from longturn.models.checkpoint.gguf import GGUFCheckpoint, huggingface_name
from longturn.models.registry import load_model
from longturn.source import ModelSource, resolve_source

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def source() -> ModelSource:
    try:
        return resolve_source(ModelConfig())
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def model(source: ModelSource) -> CausalModel:
    return load_model(source)


@pytest.fixture(scope="module")
def oracle(source: ModelSource) -> Iterator[Any]:
    """transformers' model with the state that the GGUF checkpoint gives; every one of its weights must be set."""
    checkpoint = GGUFCheckpoint(source)
    state = {name: checkpoint.load(name) for name in checkpoint.names()}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**source.config))
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffers are not in a state dict
    return model.eval()


def make_tokenizer(source: ModelSource) -> Tokenizer:
    """Good enough for real text: the vocabulary and merges of the file behind a byte-level splitter."""
    metadata = read_gguf(source.path, max_array=None).metadata
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer(source: ModelSource) -> Tokenizer:
    return make_tokenizer(source)


def real_text(*modules: types.ModuleType) -> str:
    return "\n".join(inspect.getsource(module) for module in modules)


def test_description(source: ModelSource) -> None:
    """Values read off the model's card, independent of the metadata."""
    assert (source.kind, source.architecture) == ("gguf", "LlamaForCausalLM")
    assert (source.name, source.vocab_size, source.max_context_tokens) == ("SmolLM2-135M-Instruct", 49152, 8192)
    assert source.eos_token_ids == (2,)
    assert source.config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}


def test_weights_equal_the_gguf_library(source: ModelSource) -> None:
    """Bit for bit, all 272 tensors; rows of queries and keys moved back as transformers' own GGUF reader moves them."""
    checkpoint = GGUFCheckpoint(source)
    heads = {"q_proj": source.config["num_attention_heads"], "k_proj": source.config["num_key_value_heads"]}
    seen = set()
    for tensor in read_gguf(source.path).tensors.values():
        name = huggingface_name(tensor.name)
        assert name is not None
        stored = np.fromfile(source.path, np.uint8, tensor.nbytes, offset=tensor.offset_bytes)
        if tensor.type == "F32":
            want = stored.view(np.float32)
        else:
            want = gguf.dequantize(stored.reshape(tensor.shape[0], -1), gguf.GGMLQuantizationType[tensor.type])
        for part, count in heads.items():
            if part in name:
                rows, columns = want.shape
                want = want.reshape(count, rows // count // 2, 2, columns).swapaxes(2, 1).reshape(rows, columns)
        got = checkpoint.load(name)
        assert got.shape == tensor.shape
        assert np.array_equal(got.numpy().reshape(-1), np.asarray(want).reshape(-1)), name
        seen.add(name)
    assert seen == set(checkpoint.names())


def test_the_tensor_table_equals_the_gguf_library(source: ModelSource) -> None:
    ours = read_gguf(source.path, max_array=None)
    reader = gguf.GGUFReader(source.path)
    assert len(ours.tensors) == len(reader.tensors)
    for theirs in reader.tensors:
        tensor = ours.tensors[theirs.name]
        assert tensor.shape == tuple(int(n) for n in reversed(theirs.shape))
        assert (tensor.type, tensor.offset_bytes) == (theirs.tensor_type.name, theirs.data_offset)
        assert tensor.nbytes == theirs.n_bytes
    for key, value in ours.metadata.items():
        if not key.startswith("tokenizer.ggml.m"):  # 49,000 merges take the library seconds
            assert value == reader.fields[key].contents(), key


@torch.no_grad()
def test_logits_equal_transformers_over_real_text(model: CausalModel, oracle: Any, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(real_text(textwrap)).ids[:500]
    assert len(ids) == 500
    want = oracle(torch.tensor([ids])).logits[0]
    runner = PagedRunner(model, rows=1, max_tokens=500)
    got = torch.cat([runner.step({0: ids[at : at + 190]})[0] for at in range(0, 500, 190)])
    assert float((got - want).abs().max()) < 1e-3
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    # both sides use our reading of the file, so the text itself must bear witness that it is right
    loss = torch.nn.functional.cross_entropy(want[:-1], torch.tensor(ids[1:]))
    assert float(loss) < 2.5


@torch.no_grad()
def test_greedy_text_equals_transformers(model: CausalModel, oracle: Any, tokenizer: Tokenizer) -> None:
    """8 prompts of real text, 16 tokens each, decoded in one batch.

    transformers reads prompt and answer at once: if each answer token is its most likely one given those before, then
    by induction its own greedy answer is the same.
    """
    text = tokenizer.encode(real_text(inspect)).ids
    prompts = [text[at : at + 20 + 17 * row] for row, at in enumerate(range(0, 8 * 400, 400))]
    runner = PagedRunner(model, rows=8, max_tokens=300)
    last = {row: int(logits[-1].argmax()) for row, logits in runner.step(dict(enumerate(prompts))).items()}
    answers = {row: [token] for row, token in last.items()}
    for _ in range(15):
        last = {row: int(logits[-1].argmax()) for row, logits in runner.step({r: [t] for r, t in last.items()}).items()}
        for row, token in last.items():
            answers[row].append(token)
    for row, prompt in enumerate(prompts):
        logits = oracle(torch.tensor([prompt + answers[row]])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answers[row], f"prompt {row}"


def test_a_copied_file_keeps_its_own_name(source: ModelSource, tmp_path: Path) -> None:
    link = tmp_path / "my-model.gguf"
    link.write_bytes(source.path.read_bytes())
    assert resolve_source(ModelConfig(path=str(link))).name == "my-model"
    assert (
        resolve_source(ModelConfig(path=str(link), served_name="x", max_context_tokens=100)).max_context_tokens == 100
    )
