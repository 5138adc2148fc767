"""The command line's parts: prompts, options, one step in words, and what may be imported."""

import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from surefoot.cli.options import Options
from surefoot.cli.progress import LateBar
from surefoot.cli.prompt import read_prompt
from surefoot.cli.steps import render, token_shower
from surefoot.engine.loop import StepRecord
from surefoot.errors import InputError
from surefoot.loading.tiny import byte_tokenizer
from surefoot.loading.tokenizer import Tokenizer
from surefoot.sampling import SamplingParams
from surefoot.sequence import Sequence
from surefoot.types import Draft, Verdict


def test_help_needs_neither_torch_nor_the_engine() -> None:
    program = (
        "import sys, surefoot.cli.main, typer\n"
        "typer.main.get_command(surefoot.cli.main.app)\n"
        "print([name for name in ('torch', 'numpy', 'tokenizers', 'safetensors') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


class TestPrompt:
    def test_argument(self) -> None:
        assert read_prompt(Options(prompt="def f")) == "def f"

    def test_file_as_it_is(self, tmp_path: Path) -> None:
        file = tmp_path / "p.txt"
        file.write_bytes("né\r\n".encode())
        assert read_prompt(Options(file=file)) == "né\r\n"

    @pytest.mark.parametrize("prompt", ["-", None])
    def test_standard_input(self, monkeypatch: pytest.MonkeyPatch, prompt: str | None) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("日本\n".encode()), encoding="ascii"))
        assert read_prompt(Options(prompt=prompt)) == "日本\n"

    def test_nothing_on_a_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
        with pytest.raises(InputError, match=r"prompt: expected a text, .* found none"):
            read_prompt(Options())

    def test_token_ids(self) -> None:
        assert read_prompt(Options(token_ids="5, 17 3")) == [5, 17, 3]
        with pytest.raises(InputError, match="--token-ids: expected integers"):
            read_prompt(Options(token_ids="5,x"))

    def test_two_sources(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="expected one source, found PROMPT and --file"):
            read_prompt(Options(prompt="a", file=tmp_path))

    @pytest.mark.parametrize(
        "raw, named",
        [
            (b"", "at least one character"),
            (b"a\0b", "binary data .a NUL at byte 1"),
            (b"a\xff", "UTF-8 text, found: .*0xff"),
        ],
    )
    def test_files_that_are_no_prompt(self, tmp_path: Path, raw: bytes, named: str) -> None:
        file = tmp_path / "p.txt"
        file.write_bytes(raw)
        with pytest.raises(InputError, match=named):
            read_prompt(Options(file=file))

    def test_files_that_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"nowhere: expected a readable file, found: No such file"):
            read_prompt(Options(file=tmp_path / "nowhere"))
        with pytest.raises(InputError, match=r"expected a readable file, found: Is a directory"):
            read_prompt(Options(file=tmp_path))


class TestStep:
    def record(self, draft: str, accepted: int, token: str, emitted: int) -> StepRecord:
        sequence = Sequence(0, [1, 2, 3], SamplingParams(), limit=100)
        return StepRecord(
            sequence, 10, Draft(tuple(draft.encode()), None, "ngram"), Verdict(accepted, ord(token)), emitted
        )

    def words(self, record: StepRecord) -> list[str]:
        return render(record, 4, "", token_shower(Tokenizer(byte_tokenizer()))).plain.splitlines()

    def test_a_rejection(self) -> None:
        record = self.record("abcd", 2, "x", 3)
        head, line = self.words(record)
        assert head == "step 4  cache 9 → 12  ngram  kept 2 of 4"
        assert line == '  accepted "a" "b"  rejected "c"  not judged "d"  replacement "x"'

    def test_a_bonus(self) -> None:
        assert self.words(self.record("ab", 2, "x", 3))[1] == '  accepted "a" "b"  bonus "x"'

    def test_no_draft(self) -> None:
        assert self.words(self.record("", 0, "x", 1)) == ["step 4  cache 9 → 10  ngram  no draft", '  token "x"']

    def test_the_end_inside_the_draft(self) -> None:
        record = self.record("abc", 3, "x", 2)
        assert self.words(record)[1] == '  accepted "a" "b"  after the end "c"'

    def test_colours(self) -> None:
        spans = render(self.record("abcd", 2, "x", 3), 4, "", str).spans
        assert [str(span.style) for span in spans if span.style != "bright_black"] == [
            "bold",
            "green",
            "green",
            "red strike",
            "bright_black strike",
            "bold blue",
        ]

    def test_tokens_without_text_are_shown_by_id(self) -> None:
        show = token_shower(Tokenizer(byte_tokenizer()))
        assert [show(token) for token in (10, 0xE9, 257, 259)] == ['"\\n"', "#233", '"<|im_start|>"', "#259"]
        assert token_shower(None)(7) == "#7"


def test_a_bar_that_starts_anew_has_the_next_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with LateBar("loading", "recording", after=0) as bar:
        labels = []
        for done in (1, 5, 1, 2, 1):
            bar(done, 5)
            assert bar._progress is not None
            labels.append(bar._progress.tasks[0].description)
    assert labels == ["loading", "loading", "recording", "recording", "recording"]
