"""Rows that follow a grammar, against brute force over finite languages and against `jsonschema`."""

from __future__ import annotations

import json
import random
import re
import threading

import jsonschema
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.grammars import END, TOKENS, VOCAB, decode, random_document, vocabulary

from longturn.engine.records import NewRow, RowWork, SamplingParams, StepPlan, pack_tokens
from longturn.executor.cpu import CpuExecutor
from longturn.executor.grammar import GrammarError, GrammarRow, Grammars
from longturn.executor.rows import StepInputs
from longturn.executor.sampler import SamplingState, sample
from longturn.frontend import grammar
from longturn.frontend.grammar import library_text

GRAMMARS = Grammars(vocabulary, VOCAB)


def allowed(row: GrammarRow) -> set[int]:
    words = row.mask()
    assert words.dtype == np.int32 and words.shape == (-(-VOCAB // 32),)
    ids = {i for i in range(32 * len(words)) if int(words[i // 32]) >> i % 32 & 1}
    assert max(ids, default=0) < VOCAB, "a bit stands for no token"
    return ids


def walk(row: GrammarRow, rng: random.Random, most: int = 400) -> tuple[list[int], bool]:
    """Random allowed tokens, rather such as end something; and whether the grammar was ended."""
    ids: list[int] = []
    ending = {END, *(i for i in range(VOCAB) if TOKENS[i] in (b'"', b"}", b"]", b",", b"0"))}
    for _ in range(most):
        choices = allowed(row)
        token = rng.choice(sorted(choices & ending if choices & ending and rng.random() < 0.5 else choices))
        if token == END:
            return ids, True
        ids.append(token)
        row.advance(token)
    return ids, False


TEXTS = st.lists(st.text(alphabet='ab"é ', max_size=5), min_size=1, max_size=6, unique=True)


@given(TEXTS, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_a_mask_allows_what_leads_to_one_of_the_choices(texts: list[str], rng: random.Random) -> None:
    row = GRAMMARS.row(library_text(grammar.choice(texts)), [])
    done = b""
    encoded = [text.encode() for text in texts]
    for _ in range(12):
        possible = {i for i in range(VOCAB) if TOKENS[i] and any(t.startswith(done + TOKENS[i]) for t in encoded)}
        found = allowed(row)
        # Where there is one way on, the library keeps to the tokeniser's own way of writing it.
        assert found - {END} <= possible
        assert bool(found - {END}) == bool(possible)
        assert (END in found) == (done in encoded)
        token = rng.choice(sorted(found))
        row.advance(token)
        if token == END:
            assert allowed(row) == {END}, "after the end there is nothing but the end"
            assert done.decode() in texts
            return
        done += TOKENS[token]
    raise AssertionError("the choices are shorter than this")


PATTERNS = [
    r"[a-c]{2,4}x?",
    r"(yes|no)+",
    r"\d{3}-\d{1,2}",
    r"a/b",
    r"^[^ x]{1,3}$",
    r"(?:ab|abc)*",
    r"\{\}|\[\]",
    r"é{1,3}",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_a_pattern_allows_is_what_re_matches(pattern: str) -> None:
    text = library_text(grammar.regex(pattern))
    ended = 0
    for seed in range(40):
        ids, over = walk(GRAMMARS.row(text, []), random.Random(seed), most=60)
        if over:
            ended += 1
            assert re.fullmatch(pattern, decode(ids)), decode(ids)
    assert ended > 10


@pytest.mark.parametrize("seed", range(300))
def test_json_by_a_random_schema_is_valid(seed: int) -> None:
    rng = random.Random(seed)
    schema = random_document(rng)
    jsonschema.Draft202012Validator.check_schema(schema)
    text = library_text(grammar.json_schema(schema, compact=rng.random() < 0.3))
    for _ in range(3):
        ids, over = walk(GRAMMARS.row(text, []), rng)
        if over:
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(decode(ids)))


def test_most_random_walks_end() -> None:
    """Or the test above would check nothing."""
    ended = 0
    for seed in range(60):
        rng = random.Random(seed)
        ended += walk(GRAMMARS.row(library_text(grammar.json_schema(random_document(rng))), []), rng)[1]
    assert ended > 45


@pytest.mark.parametrize("seed", range(20))
def test_a_resumed_row_stands_where_it_stood(seed: int) -> None:
    rng = random.Random(seed)
    text = library_text(grammar.json_schema(random_document(rng)))
    ids, _ = walk(GRAMMARS.row(text, []), rng)
    cut = rng.randrange(len(ids) + 1)
    first, second = GRAMMARS.row(text, ids[:cut]), GRAMMARS.row(text, [])
    second.advance_all(ids[:cut])
    for token in [*ids[cut:], END]:
        assert allowed(first) == allowed(second)
        first.advance(token)
        second.advance(token)


def test_rows_of_one_grammar_are_apart() -> None:
    text = library_text(grammar.choice(["ax", "by"]))
    one, two = GRAMMARS.row(text, []), GRAMMARS.row(text, [])
    one.advance(ord("a"))
    assert allowed(one) == {ord("x")} and allowed(two) == {ord("a"), ord("b")}


def test_a_grammar_that_fails_says_so_and_never_looks_ended() -> None:
    for text in ("{}", "nonsense", library_text(grammar.regex("a(b"))):
        row = GRAMMARS.row(text, [])
        with pytest.raises(GrammarError, match="the grammar cannot be followed"):
            row.mask()
    # It compiles, and its limits are met on the way: the library would then allow the end alone.
    row = GRAMMARS.row(library_text(grammar.regex("a{1000000000}")), [])
    with pytest.raises(GrammarError):
        for _ in range(4):
            row.advance(max(allowed(row)))
    row = GRAMMARS.row(library_text(grammar.choice(["ab"])), [])
    row.advance(ord("z"))
    with pytest.raises(GrammarError):
        row.mask()


def test_a_vocabulary_that_does_not_load_is_the_rows_error() -> None:
    broken = Grammars(lambda: (_ for _ in ()).throw(OSError("tokenizer.json is gone")), VOCAB)
    with pytest.raises(GrammarError, match=r"tokenizer\.json is gone"):
        broken.row(library_text(grammar.choice(["a"])), []).mask()
    broken.close()


def test_the_least_recently_used_grammar_is_dropped() -> None:
    loads: list[str] = []
    grammars = Grammars(vocabulary, VOCAB, kept=2)
    compile_ = grammars._compile
    grammars._compile = lambda text: (loads.append(text), compile_(text))[1]  # type: ignore[method-assign]
    one, two, three = (library_text(grammar.choice([name])) for name in ("one", "two", "three"))
    for text in (one, two, one, three, one, two):
        grammars.row(text, [])
    assert loads == [one, two, three, two]
    grammars.close()


# --- in the sampler --------------------------------------------------------------------------------------------------


def state(text: str, **params: object) -> SamplingState:
    sampling = SamplingParams(**{"max_tokens": 9, "stop_token_ids": (END,), **params})  # type: ignore[arg-type]
    return SamplingState.create(sampling, np.zeros(1, np.int32), 1, VOCAB, GRAMMARS.row(text, []))


def favouring(*ids: int) -> npt.NDArray[np.float32]:
    logits = np.zeros(VOCAB, np.float32)
    for height, token in enumerate(reversed(ids)):
        logits[token] = 10 + height
    return logits


def test_what_is_not_allowed_counts_for_nothing() -> None:
    text = library_text(grammar.choice(["ax", "by"]))
    logits = favouring(ord("q"), ord("z"), ord("b"), ord("a"))
    assert sample(logits, state(text, temperature=0.0), 1)[0] == ord("b")
    # The most likely token of all is not allowed: it must not use up top-k, top-p or min-p.
    for options in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 0.9}):
        assert sample(logits, state(text, seed=3, **options), 1)[0] == ord("b")
    token, found = sample(logits, state(text, logprobs=1), 1)
    assert token in (ord("a"), ord("b"))
    assert found is not None and found.top_ids == (ord("q"),), "log-probabilities are those of the model"


def test_a_bias_cannot_allow_and_min_tokens_cannot_forbid_the_end() -> None:
    row = state(
        library_text(grammar.choice(["a", "ab"])), temperature=0.0, min_tokens=9, logit_bias=((ord("z"), 100.0),)
    )
    assert sample(favouring(ord("z")), row, 1)[0] == ord("a")
    row.append(ord("a"))
    # The end is allowed here, but it is too early and there is a way on.
    assert sample(favouring(END), row, 2)[0] == ord("b")
    row.append(ord("b"))
    assert sample(favouring(ord("q")), row, 3)[0] == END
    row.append(END)
    assert sample(favouring(ord("q")), row, 4)[0] == END


def test_the_draw_is_that_of_the_allowed_tokens_alone() -> None:
    """A mask changes nothing but what is possible: the same random numbers, so the same token where it is allowed."""
    text = library_text(grammar.regex("[ -~]*"))
    rng = np.random.default_rng(5)
    same = 0
    for position in range(200):
        logits = rng.normal(0, 2, VOCAB).astype(np.float32)
        free = SamplingState.create(SamplingParams(9, seed=7), np.zeros(1, np.int32), 1, VOCAB)
        unmasked = sample(logits, free, position)[0]
        masked = sample(logits, state(text, seed=7), position)[0]
        assert masked in allowed(GRAMMARS.row(text, []))
        if unmasked in allowed(GRAMMARS.row(text, [])):
            assert masked == unmasked
            same += 1
    assert 20 < same < 200


# --- in the executor -------------------------------------------------------------------------------------------------


class Uniform:
    """A model that prefers nothing."""

    vocab_size = VOCAB
    max_context_tokens = 1024
    pages = 64
    page_bytes = 1
    description = "uniform"

    def logits(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        return np.zeros((len(inputs.sample_index), VOCAB), np.float32)

    def greedy(self, inputs: StepInputs) -> npt.NDArray[np.int32]:
        return np.full(len(inputs.sample_index), 65, np.int32)

    def close(self) -> None: ...


def new_row(row: int, text: str | None, tokens: list[int], prompt_tokens: int, **params: object) -> NewRow:
    sampling = SamplingParams(**{"max_tokens": 99, "stop_token_ids": (END,), "grammar": text, **params})  # type: ignore[arg-type]
    return NewRow(row, f"r{row}", pack_tokens(tokens), prompt_tokens, (row + 1,), sampling)


def test_a_rows_grammar_holds_beside_free_and_failing_rows() -> None:
    executor = CpuExecutor(Uniform(), rows=3, vocabulary=vocabulary)
    text = library_text(grammar.choice(["ab", "cd"]))
    rows = (
        new_row(0, text, [1, 2], 2, temperature=0.0),
        new_row(1, None, [1, 2], 2, temperature=0.0),
        new_row(2, "nonsense", [1, 2], 2),
    )
    work = tuple(RowWork(row, 0, 2, True) for row in range(3))
    # Two steps in flight, as the engine runs them.
    first = executor.launch(StepPlan(1, work, rows))
    second = executor.launch(StepPlan(2, tuple(RowWork(row, 2, 1, True) for row in range(3))))
    texts = [[step.result().rows[row] for step in (first, second)] for row in range(3)]
    assert decode([t for result in texts[0] for t in result.token_ids]) in ("ab", "cd", "abc"[:2])
    assert [result.token_ids for result in texts[1]] == [(0,), (0,)]
    assert all(result.error and "grammar" in result.error for result in texts[2])
    executor.close()


def test_an_executor_without_a_vocabulary_fails_that_row() -> None:
    executor = CpuExecutor(Uniform(), rows=1)
    plan = StepPlan(1, (RowWork(0, 0, 1, True),), (new_row(0, "x", [1], 1),))
    assert "no grammars" in (executor.launch(plan).result().rows[0].error or "")
    executor.close()


def test_a_grammar_is_compiled_beside_the_steps() -> None:
    """Steps of others go on while a vocabulary loads; `ready` says when it has."""
    gate = threading.Event()

    def load_late() -> object:
        assert gate.wait(20)
        return vocabulary()

    executor = CpuExecutor(Uniform(), rows=2, vocabulary=load_late)  # type: ignore[arg-type]
    sampling = SamplingParams(9, grammar=library_text(grammar.choice(["ab"])))
    assert executor.ready(SamplingParams(9))
    assert not executor.ready(sampling)
    plan = StepPlan(1, (RowWork(0, 0, 1, True),), (new_row(0, None, [1], 1),))
    assert executor.launch(plan).result().rows[0].error is None
    assert not executor.ready(sampling)
    gate.set()
    late = StepPlan(2, (RowWork(1, 0, 1, True),), (new_row(1, sampling.grammar, [1], 1),))
    assert executor.launch(late).result().rows[0].error is None
    assert executor.ready(sampling)
    executor.close()
