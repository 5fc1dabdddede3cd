"""Tokens to text: whole characters, any split, stop strings in every position."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from merestone.models.tiny_tokenizer import tokenizer_files
from merestone.serve.text import ChoiceText, StopStrings, TextError, Vocabulary

VOCABULARY = Vocabulary(Tokenizer.from_str(tokenizer_files(64)["tokenizer.json"]))


def feed(stream: ChoiceText, tokens: list[int]) -> str:
    text = ""
    for token in tokens:
        piece, met = stream.push(token)
        text += piece
        if met:
            break
    return text + stream.flush()


@given(st.text(max_size=60))
def test_any_text_comes_back(text: str) -> None:
    tokens = VOCABULARY.encode(text)
    assert feed(ChoiceText(VOCABULARY), list(tokens)) == text
    assert VOCABULARY.decode(tokens) == text


@given(st.lists(st.integers(0, 319), max_size=60))
def test_any_ids_equal_the_library(tokens: list[int]) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_files(64)["tokenizer.json"])
    expected = tokenizer.decode(tokens, skip_special_tokens=False)
    assert VOCABULARY.decode(tokens) == expected
    streamed = feed(ChoiceText(VOCABULARY), tokens)
    # an unfinished last character is the only difference
    assert expected.startswith(streamed)
    assert set(expected[len(streamed) :]) <= {"\ufffd"}


def test_no_broken_characters() -> None:
    stream = ChoiceText(VOCABULARY)
    pieces = [stream.push(token)[0] for token in VOCABULARY.encode("a\u20ac\U0001f642b")]
    assert [piece for piece in pieces if piece] == ["a", "\u20ac", "\U0001f642", "b"]
    stream = ChoiceText(VOCABULARY)
    assert [stream.push(token)[0] for token in "\u20ac".encode()[:2]] == ["", ""]
    assert stream.flush() == ""


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first (of several, the longest)."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            best = max(done, key=len)
            return text[: end - len(best)], best
    return text, None


@settings(max_examples=300)
@given(
    st.text("ab", max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 5), min_size=1),
)
def test_stop_strings_in_any_pieces(text: str, stops: list[str], cuts: list[int]) -> None:
    scanner, out, place, turn = StopStrings(stops), "", 0, 0
    while place < len(text) and scanner.matched is None:
        size = cuts[turn % len(cuts)] or 1
        out += scanner.push(text[place : place + size])
        place, turn = place + size, turn + 1
        assert oracle(text, stops)[0].startswith(out)
    out += scanner.flush()
    assert (out, scanner.matched) == oracle(text, stops)


def test_stop_string_over_tokens_and_held_text() -> None:
    stream = ChoiceText(VOCABULARY, ["</end>"])
    pieces = [stream.push(token) for token in VOCABULARY.encode("x</en</end>y")[:11]]
    assert "".join(piece for piece, _ in pieces) == "x</en"
    assert pieces[-1][1]
    assert stream.matched == "</end>"
    assert stream.flush() == ""


def test_stop_string_inside_a_character_boundary() -> None:
    assert feed(ChoiceText(VOCABULARY, ["\u20ac"]), list(VOCABULARY.encode("a\u20acb"))) == "a"


def test_min_tokens_and_hidden_ids() -> None:
    tokens = list(VOCABULARY.encode("abab"))
    assert feed(ChoiceText(VOCABULARY, ["b"], min_tokens=2), tokens) == "aba"
    hidden = VOCABULARY.special | {ord("b")}
    tokens = list(VOCABULARY.encode("a<|user|><think>b"))
    assert feed(ChoiceText(VOCABULARY, hidden=hidden), tokens) == "a<think>"


def test_labels_are_unique() -> None:
    labels = [VOCABULARY.label(token) for token in range(320)]
    assert len(set(labels)) == 320
    assert VOCABULARY.label(0xE2) == "bytes:\\xe2"
    assert VOCABULARY.label(300) == "token_id:300"


def test_other_tokenizers_are_refused(tmp_path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.Metaspace()
    with pytest.raises(TextError, match="Metaspace"):
        Vocabulary(tokenizer)
    with pytest.raises(TextError, match="no such file"):
        Vocabulary.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TextError, match=r"tokenizer\.json"):
        Vocabulary.load(tmp_path)
