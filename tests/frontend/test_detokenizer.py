"""Incremental detokenisation: however ids come, the pieces are the whole, and no piece ends inside a character."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from longturn.frontend.detokenizer import Detokenizer
from longturn.frontend.gguf_tokenizer import gguf_backend
from longturn.frontend.tokenizer import Tokenizer, TokenizerSettings
from tests.frontend.fakes import sentencepiece_metadata, tiny_tokenizer

BYTE_LEVEL = tiny_tokenizer()
_backend, _special = gguf_backend(sentencepiece_metadata(), "test")
SENTENCEPIECE = Tokenizer(_backend, TokenizerSettings(_special))


def pieces_of(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@given(st.lists(st.integers(0, 310)), st.booleans())
def test_any_ids_add_up_to_the_librarys_decode(ids: list[int], skip: bool) -> None:
    pieces = pieces_of(Detokenizer(BYTE_LEVEL, skip_special_tokens=skip), ids)
    assert "".join(pieces) == BYTE_LEVEL._backend.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@given(st.text(), st.data())
def test_valid_text_never_shows_half_a_character(text: str, data: st.DataObject) -> None:
    # Random splits of the text's bytes over tokens: single bytes and merges, as a model may write them.
    ids: list[int] = []
    for char in text:
        encoded = BYTE_LEVEL.encode(char)
        single = [i for byte in char.encode() for i in [token_of_byte(byte)]]
        ids += data.draw(st.sampled_from([encoded, single]))
    detokenizer = Detokenizer(BYTE_LEVEL, skip_special_tokens=False)
    shown, sent = "", 0
    for token in ids:
        shown += detokenizer.push(token)
        assert text.startswith(shown)
        sent += len(BYTE_LEVEL.token_bytes(token))
        assert detokenizer.whole == (len(shown.encode()) == sent)
    assert shown == text and detokenizer.flush() == ""


def token_of_byte(byte: int) -> int:
    return next(i for i in range(256) if BYTE_LEVEL.token_bytes(i) == bytes([byte]))


def test_held_back_bytes() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    smile = [token_of_byte(byte) for byte in "\U0001f600".encode()]
    assert [detokenizer.push(token) for token in smile] == ["", "", "", "\U0001f600"]
    assert detokenizer.push(smile[0]) == "" and not detokenizer.whole
    # A byte that cannot continue the character makes the first one final, and comes with it.
    assert detokenizer.push(token_of_byte(ord("x"))) == "\ufffdx"
    detokenizer.push(smile[0])
    detokenizer.push(smile[1])
    assert detokenizer.flush() == "\ufffd"


def test_special_token_does_not_break_a_character() -> None:
    first, second = (token_of_byte(byte) for byte in "\u00e9".encode())
    skipping = Detokenizer(BYTE_LEVEL)
    assert "".join(skipping.push(i) for i in (first, 301, second)) == "\u00e9"
    showing = Detokenizer(BYTE_LEVEL, skip_special_tokens=False)
    assert "".join(showing.push(i) for i in (first, 301, second)) == "\ufffd<|im_end|>\ufffd"


@given(st.text(alphabet="ab c\u00e9\U0001f600"))
def test_sentencepiece_text(text: str) -> None:
    ids = SENTENCEPIECE.encode(text)
    assert "".join(pieces_of(Detokenizer(SENTENCEPIECE), ids)) == SENTENCEPIECE._backend.decode(ids) == text
    continued = "".join(pieces_of(Detokenizer(SENTENCEPIECE, continues=True), ids))
    assert continued == (" " + text if text else "")
