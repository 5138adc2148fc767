"""Tokenizer: round trips, chat templates, and streams that never show half a character."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from surefoot.errors import CheckpointError, InputError, TokenizerError
from surefoot.loading.tiny import CHAT_TEMPLATE, byte_tokenizer, tiny_config, write_checkpoint
from surefoot.loading.tokenizer import StreamDecoder, Tokenizer, require_tokenizer
from surefoot.model.tensors import random_tensors

TEXT = "def café(naïve): return '日本語 😀👩‍👩‍👧' * 2  # ünïcödé\n\tμ≤Ω and so on and so on"


def trained() -> Backend:
    """Byte-level BPE with real merges, some of them inside characters."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    backend.train_from_iterator([TEXT] * 3, trainer)
    return backend


def metaspace() -> Backend:
    """The other common kind: words begin with a mark for their space, unknown bytes have tokens of their own."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁the": 256, "▁cat": 257, "s": 258, "▁": 259}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    return backend


TOKENIZERS = {
    "bytes": Tokenizer(byte_tokenizer()),
    "trained": Tokenizer(trained()),
    "metaspace": Tokenizer(metaspace()),
}


def stream(tokenizer: Tokenizer, tokens: list[int], sizes: list[int], skip: bool = True) -> list[str]:
    decoder = StreamDecoder(tokenizer, skip)
    pieces, rest = [], tokens
    for size in [*sizes, len(tokens)]:
        pieces.append(decoder.push(rest[:size]))
        rest = rest[size:]
    return [*pieces, decoder.flush()]


@given(st.text())
def test_encode_and_decode(text: str) -> None:
    for kind in ("bytes", "trained"):
        tokenizer = TOKENIZERS[kind]
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", ["bytes", "trained"])
@given(data=st.data(), sizes=st.lists(st.integers(0, 5), max_size=60), skip=st.booleans())
def test_a_stream_of_any_tokens_adds_up_to_their_text(
    kind: str, data: st.DataObject, sizes: list[int], skip: bool
) -> None:
    tokenizer = TOKENIZERS[kind]
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=80))
    assert "".join(stream(tokenizer, tokens, sizes, skip)) == tokenizer.decode(tokens, skip)


@given(text=st.lists(st.sampled_from(["▁the", "▁cat", "s", "▁", "é", "日", "😀"])), sizes=st.lists(st.integers(0, 5)))
def test_a_stream_with_byte_fallback_adds_up_too(text: list[str], sizes: list[int]) -> None:
    tokenizer = TOKENIZERS["metaspace"]
    tokens: list[int] = []
    for word in text:
        known = tokenizer.backend.token_to_id(word)
        tokens += word.encode() if known is None else [known]
    assert "".join(stream(tokenizer, tokens, sizes)) == tokenizer.decode(tokens)


@given(text=st.text(min_size=1), size=st.integers(1, 4))
def test_no_piece_of_a_valid_text_holds_half_a_character(text: str, size: int) -> None:
    tokens = TOKENIZERS["bytes"].encode(text)
    pieces = stream(TOKENIZERS["bytes"], tokens, [size] * len(tokens))
    assert "".join(pieces) == text
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")
    if not text.endswith("\ufffd"):
        assert pieces[-1] == ""  # nothing complete was held back


def test_a_character_comes_with_its_last_byte() -> None:
    decoder = StreamDecoder(TOKENIZERS["bytes"])
    assert [decoder.push([byte]) for byte in "a😀b".encode()] == ["a", "", "", "", "😀", "b"]
    assert decoder.flush() == ""


def test_a_long_stream_stays_cheap() -> None:
    decoder = StreamDecoder(TOKENIZERS["bytes"])
    for byte in (TEXT * 50).encode():
        decoder.push([byte])
        assert len(decoder._window) <= StreamDecoder.LONG + 4


def test_special_tokens() -> None:
    tokenizer = TOKENIZERS["bytes"]
    assert tokenizer.encode("<|im_start|>a") == [257, ord("a")]
    assert tokenizer.decode([257, ord("a"), 258]) == "a"
    assert tokenizer.decode([257, ord("a")], skip_special_tokens=False) == "<|im_start|>a"
    assert tokenizer.vocab_size == 259
    assert tokenizer.decode([ord("a"), 259, 10_000]) == "a"  # padding rows have no text


def test_bad_input() -> None:
    with pytest.raises(InputError, match="text: expected characters that UTF-8 can hold"):
        TOKENIZERS["bytes"].encode("a\ud800")
    with pytest.raises(InputError, match=r"tokens\[1\]: expected a token id from 0 to 4294967295, found -1"):
        TOKENIZERS["bytes"].decode([3, -1])
    with pytest.raises(InputError, match=r"tokens\[0\]: .*found 1099511627776"):
        TOKENIZERS["bytes"].decode([2**40])
    with pytest.raises(InputError, match="text: expected a string, found 5"):
        TOKENIZERS["bytes"].encode(5)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(TokenizerError, match=r"prompt: expected a model folder with tokenizer.json"):
        require_tokenizer(None, "prompt")


class TestFolder:
    def folder(self, path: Path, **settings: Any) -> Path:
        config = tiny_config(mtp_layers=0)
        write_checkpoint(path, config, random_tensors(config, 0), tokenizer=byte_tokenizer())
        if settings:
            (path / "tokenizer_config.json").write_text(json.dumps(settings))
        return path

    def load(self, path: Path) -> Tokenizer:
        return require_tokenizer(Tokenizer.from_folder(path), "this test")

    def test_round_trip(self, tmp_path: Path) -> None:
        tokenizer = self.load(self.folder(tmp_path))
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
        assert tokenizer.eos_token_id == 256
        assert tokenizer.chat_template == CHAT_TEMPLATE

    def test_no_tokenizer(self, tmp_path: Path) -> None:
        assert Tokenizer.from_folder(tmp_path) is None

    def test_special_tokens_written_as_objects(self, tmp_path: Path) -> None:
        self.folder(tmp_path, eos_token={"content": "<|im_end|>", "lstrip": False}, bos_token=None)
        assert self.load(tmp_path).eos_token_id == 258

    def test_one_of_several_templates(self, tmp_path: Path) -> None:
        templates = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
        assert self.load(self.folder(tmp_path, chat_template=templates)).chat_template == "yes"

    def test_the_template_file_wins(self, tmp_path: Path) -> None:
        (self.folder(tmp_path, chat_template="old") / "chat_template.jinja").write_text("new")
        assert self.load(tmp_path).chat_template == "new"

    @pytest.mark.parametrize("text", ["", "{}", "not json", '{"model": 3}', "\x00"])
    def test_a_damaged_tokenizer(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenizer.json: expected a tokenizer"):
            Tokenizer.from_folder(tmp_path)

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
    @pytest.mark.parametrize("raw", [b"\xff\xfe\x00", None], ids=["not UTF-8", "a folder"])
    def test_what_cannot_be_read(self, tmp_path: Path, name: str, raw: bytes | None) -> None:
        file = self.folder(tmp_path) / name
        file.unlink(missing_ok=True)
        file.mkdir() if raw is None else file.write_bytes(raw)
        with pytest.raises(CheckpointError, match=name):
            Tokenizer.from_folder(tmp_path)

    @pytest.mark.parametrize(
        "template",
        [
            [],
            {},
            {"default": "x"},
            3,
            True,
            [None],
            [{}],
            [{"name": [1], "template": "x"}],
            [{"name": {"a": 1}, "template": "x"}],
            [{"name": "default"}],
            [{"name": "default", "template": 3}],
        ],
        ids=repr,
    )
    def test_templates_that_are_none(self, tmp_path: Path, template: object) -> None:
        with pytest.raises(CheckpointError, match=r"tokenizer_config.json: chat_template: expected a template, found"):
            Tokenizer.from_folder(self.folder(tmp_path, chat_template=template))

    def test_odd_entries_beside_the_default_template(self, tmp_path: Path) -> None:
        templates = [{"name": [1], "template": "no"}, None, {"name": "default", "template": "yes"}]
        assert self.load(self.folder(tmp_path, chat_template=templates)).chat_template == "yes"

    @pytest.mark.parametrize("token", ["\ud800", {"content": "\ud800"}], ids=["text", "object"])
    def test_special_tokens_that_no_text_holds(self, tmp_path: Path, token: object) -> None:
        with pytest.raises(CheckpointError, match=r"tokenizer_config.json: eos_token: expected UTF-8 text"):
            Tokenizer.from_folder(self.folder(tmp_path, eos_token=token))

    def test_names_too_long_for_the_system(self) -> None:
        with pytest.raises(CheckpointError, match=r"expected a file's name, found: .*too long"):
            Tokenizer.from_folder("a" * 5000)

    def test_damage_beside_it(self, tmp_path: Path) -> None:
        (self.folder(tmp_path) / "tokenizer_config.json").write_text("[")
        with pytest.raises(CheckpointError, match=r"tokenizer_config.json"):
            Tokenizer.from_folder(tmp_path)
        with pytest.raises(CheckpointError, match="chat_template: expected a template"):
            Tokenizer.from_folder(self.folder(tmp_path, chat_template=[3]))
        (self.folder(tmp_path) / "chat_template.jinja").write_bytes(b"\xff")
        with pytest.raises(CheckpointError, match=r"chat_template.jinja"):
            Tokenizer.from_folder(tmp_path)


class TestChat:
    def chat(self, template: str | None, **kwargs: Any) -> str:
        tokenizer = Tokenizer(byte_tokenizer(), template, {"eos_token": "<|im_end|>"})
        return tokenizer.apply_chat([{"role": "user", "content": "hi"}], **kwargs)

    def test_the_usual_template(self) -> None:
        text = self.chat(CHAT_TEMPLATE)
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        tokenizer = Tokenizer(byte_tokenizer(), CHAT_TEMPLATE)
        assert tokenizer.encode(text, add_special_tokens=False)[0] == 257
        without = tokenizer.apply_chat([{"role": "user", "content": "hi"}], add_generation_prompt=False)
        assert text.startswith(without)
        assert "assistant" not in without

    def test_arguments_and_special_tokens_reach_it(self) -> None:
        assert self.chat("{{ eos_token }}{{ enable_thinking }}", enable_thinking=False) == "<|im_end|>False"

    def test_json_is_not_escaped_for_html(self) -> None:
        assert self.chat("{{ tools | tojson }}", tools=[{"a": "<é>"}]) == '[{"a": "<é>"}]'

    def test_loop_controls_and_block_trimming(self) -> None:
        assert self.chat("  {% for m in messages %}\n{% break %}\n{% endfor %}x") == "x"

    @pytest.mark.parametrize(
        "template, named",
        [
            (None, "found none"),
            ("{% for %}", "Expected"),
            ("{{ raise_exception('no system message') }}", "no system message"),
            ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
            ("{{ messages.append(1) }}", "safe"),
            ("{{ 1 + 'a' }}", "unsupported operand"),
            ("{{ missing.field }}", "missing"),
            ("{{ 1 / 0 }}", "division by zero"),
            ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recursion"),
            ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ],
    )
    def test_refusals(self, template: str | None, named: str) -> None:
        with pytest.raises(TokenizerError, match=f"chat template: .*{named}"):
            self.chat(template)
