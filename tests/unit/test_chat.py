"""`surefoot chat`, driven through a pipe as a script would drive it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from surefoot.cli import chat as command
from surefoot.cli.main import app
from surefoot.engine.engine import Engine
from surefoot.engine.loaded import LoadedModel
from surefoot.loading.tiny import Style, byte_tokenizer, tiny_config, write_checkpoint
from surefoot.model.tensors import random_tensors
from surefoot.sampling import SamplingParams


def say(*lines: str | bytes, options: tuple[object, ...] = ("-n", 12)) -> Result:
    stdin = b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines)
    return CliRunner().invoke(app, ["chat", *map(str, options)], input=stdin)


def saved(file: Path, *lines: str, options: tuple[object, ...] = ("-n", 12)) -> list[dict[str, Any]]:
    result = say(*lines, f"/save {file}", options=options)
    assert result.exit_code == 0, result.stderr
    messages: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return messages


def answers(*conversations: list[dict[str, str]], tokens: int = 12) -> list[str]:
    """What the engine gives for each."""
    with torch.inference_mode():
        engine = Engine.from_pretrained("surefoot-demo", drafter="none", draft_length=0)
        assert engine.tokenizer is not None
        prompts = [engine.tokenizer.apply_chat(messages) for messages in conversations]
        return [engine.generate(prompt, SamplingParams(max_new_tokens=tokens)).text for prompt in prompts]


def test_remembers_what_was_said(tmp_path: Path) -> None:
    messages = saved(tmp_path / "talk.json", "Hello", "And then?")
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant"]
    assert [messages[1]["content"], messages[3]["content"]] == answers(messages[:1], messages[:3])


def test_what_is_kept_of_turns_changes_no_token(tmp_path: Path) -> None:
    messages = saved(tmp_path / "talk.json", "word " * 600, "And then?", "So?")
    assert messages[3]["content"] == answers(messages[:3])[0]
    assert messages[5]["content"] == answers(messages[:5])[0]


def test_prints_answers_only(tmp_path: Path) -> None:
    result = say("Hello")
    assert result.stdout == answers([{"role": "user", "content": "Hello"}])[0] + "\n"
    assert result.stderr == "cut after 12 tokens (--max-new-tokens, --max-len)\n"


def test_several_lines(tmp_path: Path) -> None:
    messages = saved(
        tmp_path / "talk.json", "one \\", "two", '"""', "/quit", "  is a word", '"""', '"""x"""', '"""to the', "end",
        '"""',
    )  # fmt: skip
    assert [message["content"] for message in messages[::2]] == ["one \ntwo", "/quit\n  is a word", "x", "to the\nend"]


def test_block_that_never_ends() -> None:
    assert say('"""Hello').stdout.strip() != ""


def test_system_and_reset(tmp_path: Path) -> None:
    messages = saved(tmp_path / "talk.json", "Hello", "/system Be brief.", "/reset", "", "Hi")
    system = {"role": "system", "content": "Be brief."}
    assert messages[:2] == [system, {"role": "user", "content": "Hi"}]
    assert messages[2]["content"] == answers(messages[:2])[0]
    assert saved(tmp_path / "talk.json", "/system Be brief.", "/system") == []


def test_drafters_change_no_token(tmp_path: Path) -> None:
    told = ("Tell me more", "/reset")
    result = say(*told, "/drafter ngram 2", *told, "/drafter none", *told, "/drafter mtp", "Tell me more", "/stats",
                 options=("-n", 12, "-t", 0.9, "--seed", 4))  # fmt: skip
    assert result.exit_code == 0
    text = result.stdout.split("ngram, K = 2\n")[0]
    assert result.stdout.startswith(f"{text}ngram, K = 2\n{text}none\n{text}mtp, K = 3\n{text}mtp, K = 3: 12 tokens in")


def test_drafter_tells_which() -> None:
    assert say("/drafter").stdout == "auto, K = 8\n"
    assert say("/drafter", options=("-d", "none", "-k", 0)).stdout == "none\n"


def test_stats_before_anything() -> None:
    assert say("/stats").stdout == "no answer yet\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/nonsense", "/help"),
        ("/drafter tea", "drafter: expected one of"),
        ("/drafter draft-model", "drafter: expected one of"),
        ("/drafter mtp x", "expected a draft length"),
        ("/drafter mtp 99", "draft_length: expected"),
        ("/save", "expected a file's name"),
        ("/save /nowhere/at/all", "expected a file that can be written"),
        ("word " * 5000, "prompt: expected at most"),
    ],
)
def test_a_bad_line_ends_nothing(line: str, expected: str) -> None:
    result = say(line, "/help")
    assert result.exit_code == 0
    assert expected in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == command.HELP + "\n"


def test_a_refused_message_is_forgotten(tmp_path: Path) -> None:
    messages = saved(tmp_path / "talk.json", "word " * 5000, "Hello")
    assert [message["role"] for message in messages] == ["user", "assistant"]


def test_quit() -> None:
    assert say("/quit", "Hello").stdout == ""


def test_not_utf8() -> None:
    result = say(b"\xff\xfe")
    assert result.exit_code == 2
    assert "UTF-8" in result.stderr


def test_a_second_model_drafts() -> None:
    result = say("/drafter", "Hello", "/stats", options=("-n", 8, "--draft-model", "surefoot-demo"))
    assert "draft-model, K = 3\n" in result.stdout
    assert "accepted" in result.stdout


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("-d", "draft-model"), "--draft-model"),
        (("--dtype", "int3"), "dtype"),
        (("-t", -1), "temperature"),
        (("--weights", "fp8"), "fp8"),
        (("--max-len", 0), "max_len"),
        (("-d", "ngram", "--draft-vocab", 100), "draft_vocab"),
        (("--min-confidence", 0.3), "min_confidence: expected with one of mtp, mtp+ngram, mtp+suffix"),
    ],
)
def test_refused_before_loading(options: tuple[object, ...], expected: str) -> None:
    result = say("Hello", options=options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert expected in result.stderr


@pytest.mark.parametrize("tokenizer", [False, True])
def test_a_model_that_cannot_chat(tmp_path: Path, tokenizer: bool) -> None:
    config = tiny_config(layer_types=("full_attention",))
    folder = write_checkpoint(tmp_path / "model", config, random_tensors(config, seed=1), style=Style(mtp="missing"),
                              tokenizer=byte_tokenizer() if tokenizer else None)  # fmt: skip
    if tokenizer:
        (folder / "tokenizer_config.json").unlink()  # the template is in it
    result = say("Hello", options=("-m", folder, "-d", "none"))
    assert result.exit_code == 2
    assert ("chat template" if tokenizer else "tokenizer.json") in result.stderr


def test_thoughts_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template opens them in the prompt; this model never ends them, so all is thought and nothing is printed."""
    plain = LoadedModel.from_checkpoint

    def thinking(*args: Any, **kwargs: Any) -> LoadedModel:
        loaded = plain(*args, **kwargs)
        assert loaded.tokenizer is not None
        assert loaded.tokenizer.chat_template is not None
        loaded.tokenizer.chat_template += "{{ '<think>\\n' }}"
        return loaded

    monkeypatch.setattr(LoadedModel, "from_checkpoint", thinking)
    messages = saved(tmp_path / "talk.json", "Hello")
    assert messages[1]["content"] == ""
    assert messages[1]["reasoning_content"]


def test_ctrl_c_stops_the_answer_and_keeps_its_text(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "from surefoot.cli.main import run; run()", "chat", "-n", "3000", "--ignore-eos"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("Hello\n")
        begun = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(f"/save {tmp_path / 'talk.json'}\n/stats\n", timeout=60)
    assert process.returncode == 0, err
    assert err == "stopped\n"
    messages = json.loads((tmp_path / "talk.json").read_text())
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert (begun + out).startswith(messages[1]["content"] + "\n2 messages in")
    assert "ended by Ctrl-C" in out
