"""Output text: whatever the tokens and the pieces they come in, streamed = unstreamed, up to the first stop string."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from surefoot.engine.text import OutputText
from surefoot.loading.tiny import byte_tokenizer
from surefoot.loading.tokenizer import Tokenizer

LETTERS = "ab é😀"


def merged() -> Backend:
    """Byte-level BPE with merges, some of which end inside a character."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["abab é😀é ba😀😀ab aab " * 3, "bb é a😀 ab"], trainer)
    return backend


BYTES, MERGED = Tokenizer(byte_tokenizer()), Tokenizer(merged())
TEXTS = st.text(LETTERS, max_size=12)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3)
ANY_TOKENS = st.lists(st.integers(0, 299), max_size=20)
CUTS = st.lists(st.integers(0, 5), max_size=6)


def streamed(tokenizer: Tokenizer, tokens: list[int], stop: list[str], cuts: list[int], least: int = 0) -> list[str]:
    text, pieces, rest = OutputText(tokenizer, stop, least), [], tokens
    for cut in [*cuts, len(tokens)]:
        pieces.append(text.push(rest[:cut]))
        rest = rest[cut:]
    return [*pieces, text.flush()]


def definition(text: str, stop: list[str]) -> str:
    """The text in front of the stop string that is complete first; of several complete at once, the longest."""
    found = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    return text[: min(found)[1]] if found else text


@settings(max_examples=300, deadline=None)
@given(ANY_TOKENS | TEXTS.map(lambda text: MERGED.encode(text)), STOPS, CUTS, st.sampled_from([BYTES, MERGED]))
def test_pieces_are_the_whole(tokens: list[int], stop: list[str], cuts: list[int], tokenizer: Tokenizer) -> None:
    tokens = [token for token in tokens if token < tokenizer.vocab_size]
    assert "".join(streamed(tokenizer, tokens, stop, cuts)) == definition(tokenizer.decode(tokens), stop)


@settings(max_examples=200, deadline=None)
@given(TEXTS, STOPS, CUTS)
@example("aab", ["ab"], [1, 1])
def test_pieces_are_valid_and_final(text: str, stop: list[str], cuts: list[int]) -> None:
    """Every piece holds whole characters, and no piece is taken back later."""
    pieces = streamed(BYTES, BYTES.encode(text), stop, cuts)
    assert all("\ufffd" not in piece for piece in pieces)
    expected = definition(text, stop)
    for count in range(len(pieces)):
        assert expected.startswith("".join(pieces[:count]))


@settings(max_examples=200, deadline=None)
@given(TEXTS, STOPS, st.integers(0, 8))
def test_it_stops_at_the_token_that_completes_the_string(text: str, stop: list[str], least: int) -> None:
    tokens = MERGED.encode(text)
    watch, read = OutputText(MERGED, stop, least), 0
    for token in tokens:
        watch.push([token])
        read += 1
        if watch.stopped:
            break
    before = [definition(MERGED.decode(tokens[:count]), stop) for count in range(read + 1)]
    whole = [MERGED.decode(tokens[:count]) for count in range(read + 1)]
    if not least:  # an unfinished character may look like U+FFFD, which is in no stop string here
        assert all(before[i] == whole[i] for i in range(read if watch.stopped else read + 1))
        assert not watch.stopped or before[read] != whole[read]
    if watch.stopped:
        assert read >= least
        assert watch.push([tokens[0]]) == watch.flush() == ""
    elif len(tokens) >= least == 0:
        assert not any(s in text for s in stop)


def test_a_string_held_back_for_a_longer_one_is_given_at_last() -> None:
    """cases.md 5: hold-back is flushed."""
    text = OutputText(BYTES, ["abc!"])
    assert [text.push(BYTES.encode(part)) for part in ("xab", "c", "d", "ab")] == ["x", "", "abcd", ""]
    assert text.flush() == "ab"
    assert text.flush() == ""
    assert not text.stopped


def test_what_comes_before_min_new_tokens_does_not_count() -> None:
    text = OutputText(BYTES, ["ab"], min_new_tokens=3)
    assert text.push(BYTES.encode("abab")) == "ab"
    assert text.stopped
    assert text.found == "ab"
    text = OutputText(BYTES, ["ab", "b"], min_new_tokens=3)
    assert text.push(BYTES.encode("abcb")) == "abc"
    text = OutputText(BYTES, ["b", "bcd"], min_new_tokens=3)  # "b" is old, "bcd" is not
    assert text.push(BYTES.encode("abcd")) == "a"


def test_a_stop_string_of_the_replacement_character() -> None:
    """It is only known at the end that nothing completes the bytes."""
    text = OutputText(BYTES, ["\ufffd"])
    assert text.push([*BYTES.encode("a"), *BYTES.encode("é")[:1]]) == "a"
    assert text.flush() == ""
    assert text.stopped


@pytest.mark.parametrize("skip, expected", [(True, "a"), (False, "a<|im_end|>")])
def test_special_tokens_show_only_if_wanted(skip: bool, expected: str) -> None:
    tokens = BYTES.encode("a<|im_end|>")
    text = OutputText(BYTES, skip_special_tokens=skip)
    assert text.push(tokens) + text.flush() == expected
