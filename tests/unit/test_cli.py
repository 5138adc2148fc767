"""`surefoot generate` and `surefoot trace` on a tiny checkpoint, as a user calls them."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from surefoot.cli.main import app
from surefoot.engine.engine import Engine
from surefoot.loading.tiny import Style, byte_tokenizer, tiny_config, write_checkpoint
from surefoot.model.tensors import random_tensors
from surefoot.sampling import SamplingParams

CONFIG = tiny_config(layer_types=("linear_attention", "full_attention"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_checkpoint(folder, CONFIG, random_tensors(CONFIG, seed=1), tokenizer=byte_tokenizer())


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No tokenizer and no MTP head."""
    folder = tmp_path_factory.mktemp("bare")
    return write_checkpoint(folder, CONFIG, random_tensors(CONFIG, seed=1), style=Style(mtp="missing"))


def call(*arguments: object, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def as_json(*arguments: object) -> dict[str, Any]:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def refused(result: Result) -> str:
    """The one line of a refusal; nothing may have been printed as output."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


class TestGenerate:
    def test_prints_the_text_of_the_tokens(self, model: Path) -> None:
        result = call("generate", "hello", "-m", model, "-n", 20)
        assert result.exit_code == 0, result.stderr
        with torch.inference_mode():
            expected = Engine.from_pretrained(model).generate("hello", SamplingParams(max_new_tokens=20))
        assert result.stdout == expected.text + "\n"
        assert "20 tokens in" in result.stderr
        assert "accepted" in result.stderr
        assert "prefill 5 tokens" in result.stderr

    def test_json(self, model: Path) -> None:
        answer = as_json("generate", "hello", "-m", model, "-n", 12, "-t", 0.8, "--seed", 3, "-d", "ngram", "-k", 2)
        assert len(answer["token_ids"]) == answer["stats"]["tokens"] == 12
        assert answer["finish_reason"] == "length"
        assert isinstance(answer["text"], str)
        assert 0 <= answer["stats"]["accepted"] <= answer["stats"]["proposed"]
        settings = answer["settings"]
        assert (settings["drafter"], settings["draft_length"], settings["seed"]) == ("ngram", 2, 3)

    def test_every_drafter_gives_the_same_tokens(self, model: Path) -> None:
        common = ("generate", "ababab", "-m", model, "-n", 16, "-t", 1, "--top-k", 20, "--seed", 5)
        outputs = [as_json(*common, "-d", name)["token_ids"] for name in ("none", "ngram", "mtp", "mtp+ngram", "auto")]
        assert outputs == [outputs[0]] * 5

    def test_a_draft_model(self, model: Path) -> None:
        common = ("generate", "ababab", "-m", model, "-n", 12)
        drafted = as_json(*common, "--draft-model", model)
        assert drafted["settings"]["drafter"] == "draft-model"
        assert drafted["token_ids"] == as_json(*common, "-d", "none")["token_ids"]

    def test_a_draft_vocabulary(self, model: Path, tmp_path: Path) -> None:
        common = ("generate", "ababab", "-m", model, "-n", 12)
        (tmp_path / "ids.json").write_text("[97, 98]")
        expected = as_json(*common, "-d", "none")["token_ids"]
        for wanted in (5, tmp_path / "ids.json"):
            answer = as_json(*common, "--draft-vocab", wanted)
            assert answer["token_ids"] == expected
            assert answer["settings"]["draft_vocab"] == str(wanted)
        assert "draft_vocab" in refused(call(*common, "-d", "ngram", "--draft-vocab", 5))

    def test_a_head_that_stops_in_doubt(self, model: Path) -> None:
        common = ("generate", "ababab", "-m", model, "-n", 24, "-d", "mtp", "-k", 6)
        whole, cut = as_json(*common), as_json(*common, "--min-confidence", 0.9)
        assert cut["token_ids"] == whole["token_ids"]
        assert cut["stats"]["proposed"] < whole["stats"]["proposed"]
        assert "min_confidence: expected at least 0 and below 1" in refused(call(*common, "--min-confidence", 1))

    def test_prompts_from_everywhere(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "p.txt").write_text("hé")
        common = ("-m", model, "-n", 5, "--json")
        ids = ",".join(str(byte) for byte in "hé".encode())
        results = [
            call("generate", "hé", *common),
            call("generate", "--file", tmp_path / "p.txt", *common),
            call("generate", "-", *common, stdin="hé"),
            call("generate", *common, stdin="hé"),
            call("generate", "--token-ids", ids, *common),
        ]
        tokens = [json.loads(result.stdout)["token_ids"] for result in results]
        assert tokens == [tokens[0]] * 5

    def test_chat_goes_through_the_template(self, model: Path) -> None:
        text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        chat = as_json("generate", "hi", "--chat", "-m", model, "-n", 4)
        assert chat["token_ids"] == as_json("generate", text, "-m", model, "-n", 4)["token_ids"]
        assert refused(call("generate", "--token-ids", "1", "--chat", "-m", model))

    def test_end_of_sequence(self, model: Path, tmp_path: Path) -> None:
        first = as_json("generate", "hello", "-m", model, "-n", 4)["token_ids"][0]
        config = tiny_config(layer_types=CONFIG.layer_types, eos_token_ids=(first,))
        write_checkpoint(tmp_path, config, random_tensors(config, seed=1), tokenizer=byte_tokenizer())
        stopped = as_json("generate", "hello", "-m", tmp_path, "-n", 4)
        assert (stopped["token_ids"], stopped["finish_reason"]) == ([first], "stop")
        assert len(as_json("generate", "hello", "-m", tmp_path, "-n", 4, "--ignore-eos")["token_ids"]) == 4

    def test_without_tokenizer_and_head(self, bare: Path) -> None:
        result = call("generate", "--token-ids", "5 17 3", "-m", bare, "-n", 6)
        assert result.exit_code == 0, result.stderr
        assert [0 <= int(token) < CONFIG.vocab_size for token in result.stdout.split()] == [True] * 6
        assert "note: drafter 'auto': no MTP head that can be used" in result.stderr
        assert "tokenizer" in refused_after_notes(call("generate", "text", "-m", bare, "-d", "none"))
        assert "mtp" in refused(call("generate", "--token-ids", "1", "-m", bare, "-d", "mtp"))

    def test_every_sampling_option(self, model: Path, tmp_path: Path) -> None:
        common = ("generate", "hello", "-m", model, "-n", 12)
        free = as_json(*common)["token_ids"]
        banned = as_json(*common, "--logit-bias", f"{free[0]}:-100,{free[1]}:-100", "--logprobs", 2)
        assert not set(free[:2]) & set(banned["token_ids"])
        assert [entry["token"] for entry in banned["logprobs"]] == banned["token_ids"]
        assert banned["logprobs"][0]["top"][0][0] == free[0]  # the model's own, before the bias
        options = ("--repetition-penalty", 1.5, "--presence-penalty", 1, "--frequency-penalty", 1, "--typical-p", 0.9,
                   "--min-new-tokens", 5, "-t", 0.8)  # fmt: skip
        assert as_json(*common, *options)["token_ids"] == as_json(*common, *options, "-d", "none")["token_ids"]
        (tmp_path / "schema.json").write_text('{"type": "boolean"}')
        for constraint in (("--json-schema", tmp_path / "schema.json"), ("--regex", "true|false")):
            answer = as_json(*common, *constraint)
            assert answer["text"] in ("true", "false")
            assert answer["finish_reason"] == "stop"
            assert call(*common, *constraint, "--compare").exit_code == 0
        assert answer["settings"]["regex"] == "true|false"

    def test_stop_strings(self, model: Path) -> None:
        common = ("generate", "hello", "-m", model, "-n", 40, "--regex", "[ab]{9}xyz[ab]{9}")
        assert as_json(*common, "--stop", "yz", "--stop", "q")["text"] == as_json(*common)["text"][:10]
        assert call(*common, "--stop", "yz").stdout == as_json(*common)["text"][:10] + "\n"

    def test_compare(self, model: Path) -> None:
        result = call("generate", "hello", "-m", model, "-n", 12, "--compare")
        assert result.exit_code == 0, result.stderr
        assert "identical tokens: yes" in result.stdout
        assert result.stdout.count("tokens/s") == 2
        assert "by draft position:" in result.stdout
        answer = as_json("generate", "hello", "-m", model, "-n", 12, "--compare")
        assert answer["identical"] is True
        assert answer["plain"]["token_ids"] == answer["token_ids"]
        assert answer["plain"]["stats"]["proposed"] == 0
        assert answer["speed_up"] > 0


class TestTrace:
    def test_each_step_in_words(self, model: Path) -> None:
        result = call("trace", "hello", "-m", model, "-n", 8)
        assert result.exit_code == 0, result.stderr
        assert result.stdout.startswith("step 1  cache 4 → ")
        assert "\x1b" not in result.stdout  # colours are for terminals
        assert "8 tokens in" in result.stderr

    def test_json_steps_add_up(self, model: Path) -> None:
        answer = as_json("trace", "hello", "-m", model, "-n", 9)
        assert [token for step in answer["steps"] for token in step["emitted"]] == answer["token_ids"]
        assert answer["steps"][-1]["cache_length"] == 5 + 9 - 1
        assert sum(step["accepted"] for step in answer["steps"]) == answer["stats"]["accepted"]

    def test_without_tokenizer(self, bare: Path) -> None:
        result = call("trace", "--token-ids", "5", "-m", bare, "-n", 3)
        assert result.exit_code == 0, result.stderr
        assert "#" in result.stdout


def refused_after_notes(result: Result) -> str:
    assert result.exit_code == 2
    return result.stderr.splitlines()[-1]


class TestBadInput:
    @pytest.mark.parametrize(
        "arguments, named",
        [
            (("-t", "-1"), "temperature"),
            (("-t", "nan"), "temperature"),
            (("--top-p", "0"), "top_p"),
            (("--min-p", "2"), "min_p"),
            (("--top-k", "-1"), "top_k"),
            (("--seed", "-1"), "seed"),
            (("-n", "0"), "max_new_tokens"),
            (("-k", "0"), "draft_length"),
            (("-k", "-3"), "draft_length"),
            (("-d", "magic"), "drafter"),
            (("--dtype", "int8"), "dtype"),
            (("--device", "toaster"), "device"),
            (("--max-len", "0"), "max_len"),
            (("--max-len", "5"), "prompt"),
            (("--acceptance", "always"), "acceptance"),
            (("--typical-p", "0"), "typical_p"),
            (("--repetition-penalty", "0"), "repetition_penalty"),
            (("--presence-penalty", "3"), "presence_penalty"),
            (("--frequency-penalty", "-3"), "frequency_penalty"),
            (("--logit-bias", "5"), "logit_bias"),
            (("--logit-bias", "5:x"), "logit_bias"),
            (("--logit-bias", "260:1"), "logit_bias"),
            (("--min-new-tokens", "300"), "min_new_tokens"),
            (("--stop", ""), "stop"),
            (("--json-schema", "/nowhere"), "/nowhere"),
            (("--regex", "(("), "unclosed group"),
            (("--logprobs", "-1"), "logprobs"),
            (("--thinking-budget", "5"), "thinking_budget"),
            (("-d", "draft-model"), "draft_model"),
            (("--draft-model", "/nowhere"), "/nowhere"),
        ],
    )
    @pytest.mark.parametrize("command", ["generate", "trace"])
    def test_options(self, model: Path, command: str, arguments: tuple[str, ...], named: str) -> None:
        assert named in refused(call(command, "hello", "-m", model, *arguments))

    def test_prompts(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "binary").write_bytes(b"\x7fELF\0\0")
        assert "prompt" in refused(call("generate", "", "-m", model))
        assert "prompt" in refused(call("generate", "-", "-m", model, stdin=""))
        assert "NUL" in refused(call("generate", "-f", tmp_path / "binary", "-m", model))
        assert "UTF-8" in refused(call("generate", "-", "-m", model, stdin=b"caf\xe9"))
        assert "nowhere" in refused(call("generate", "-f", tmp_path / "nowhere", "-m", model))
        assert "prompt[1]" in refused(call("generate", "--token-ids", "1,260", "-m", model))

    def test_models(self, model: Path, tmp_path: Path) -> None:
        assert "expected a folder" in refused(call("generate", "a", "-m", tmp_path / "nowhere"))
        assert "config.json" in refused(call("generate", "a", "-m", tmp_path))
        write_checkpoint(tmp_path, CONFIG, random_tensors(CONFIG, seed=1))
        (tmp_path / "model.safetensors").write_bytes(b"not this")
        assert "model.safetensors" in refused(call("generate", "a", "-m", tmp_path))

    def test_a_model_that_gives_nan(self, tmp_path: Path) -> None:
        tensors = random_tensors(CONFIG, seed=1)
        tensors["model.norm.weight"].fill_(float("nan"))
        write_checkpoint(tmp_path, CONFIG, tensors, tokenizer=byte_tokenizer())
        result = call("generate", "hello", "-m", tmp_path)
        assert result.exit_code == 1
        assert result.stderr.startswith("error: ")


def test_version() -> None:
    result = call("--version")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"surefoot {metadata.version('surefoot')}\n"


class TestProcess:
    """What only a real process shows."""

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        program = "from surefoot.cli.main import run; run()"
        command = [sys.executable, "-c", program, *map(str, arguments)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def test_usage_errors_take_one_line(self) -> None:
        for arguments in (("generate", "--top-k", "many"), ("generate", "--no-such"), ("juggle",)):
            process = self.start(*arguments)
            out, err = process.communicate()
            assert (process.returncode, out) == (2, "")
            assert err.startswith("error: ")
            assert err.count("\n") == 1

    def test_help_without_arguments(self) -> None:
        process = self.start()
        out, err = process.communicate()
        assert (process.returncode, err) == (0, "")
        assert "generate" in out
        assert "trace" in out

    @pytest.mark.parametrize(
        "command, how", [("trace", "interrupted"), ("trace", "reader gone"), ("generate", "reader gone")]
    )
    def test_the_end_from_outside(self, tmp_path: Path, command: str, how: str) -> None:
        # Far more than a pipe holds, or the command may have come to its own end before we get to ours.
        config = replace(CONFIG, max_positions=2**16)
        model = write_checkpoint(tmp_path, config, random_tensors(config, seed=1), tokenizer=byte_tokenizer())
        process = self.start(command, "hello", "-m", model, "-n", 60_000, "--max-len", 2**16, "--ignore-eos")
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        if how == "interrupted":
            process.send_signal(signal.SIGINT)
            process.stdout.read()  # a pipe closed too early would end it the other way
        process.stdout.close()
        err = process.stderr.read()
        process.stderr.close()
        assert process.wait() == (130 if how == "interrupted" else 141)
        assert err == ""
