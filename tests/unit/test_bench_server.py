"""`surefoot bench --server`: what clients see of a server, and that nothing is said of one whose texts are wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from surefoot import Engine
from surefoot.bench.prompts import held_out
from surefoot.bench.server import Latency, prompts
from surefoot.cli.main import app
from surefoot.loading.tiny import byte_tokenizer, tiny_config, write_checkpoint
from surefoot.model.tensors import random_tensors
from tests.fakes import keep_drafts_unseen
from tests.server import Live, serving

CONFIG = tiny_config(layer_types=("linear_attention", "full_attention"), max_positions=2048)
SMALL = ("--requests", 3, "--tokens", 12, "--rounds", 2, "--concurrency", "1,3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_checkpoint(folder, CONFIG, random_tensors(CONFIG, seed=1), tokenizer=byte_tokenizer())


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(Engine.from_pretrained("surefoot-demo", draft_length=2, slots=3, max_len=512)) as live:
        yield live


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def refused(result: Result, code: int = 2) -> str:
    assert (result.exit_code, result.stdout) == (code, "")
    (line,) = result.stderr.splitlines()
    return line


def test_a_server_that_runs(live: Live, tmp_path: Path) -> None:
    saved = tmp_path / "x.json"
    result = call("--url", live.url, *SMALL, "--json", saved)
    assert result.exit_code == 0, result.stderr
    assert "lossless: 24 texts equal those of the same requests alone (plain)" in result.stdout
    assert "tokens of prompts were not read again" in result.stdout
    report = json.loads(saved.read_text())
    assert (report["requests"], report["compared"], report["machine"]) == (3, 24, None)
    rows = {(row["name"], row["concurrency"]): row for row in report["rows"]}
    assert set(rows) == {(name, most) for name in ("plain", "MTP, K = 2") for most in (1, 3)}
    for (name, most), row in rows.items():
        assert (row["to_first"] == 1) == (most == 1)
        assert min(row["tokens_per_second"]["least"], row["per_request"]) > 0
        assert row["first_ms"]["p95"] >= row["first_ms"]["median"] > 0
        assert row["between_ms"]["p95"] >= row["between_ms"]["median"] > 0
        assert (row["acceptance_rate"] is None) == (name == "plain")


def test_a_server_of_its_own(model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "x.json"
    result = call("--server", "-m", model, *SMALL, "--dtype", "float32", "--drafters", "mtp+ngram", "--depths", "1,3",
                  "--json", saved)  # fmt: skip
    assert result.exit_code == 0, result.stderr
    report = json.loads(saved.read_text())
    assert [(row["depth"], row["concurrency"]) for row in report["rows"]] == [(1, 1), (1, 3), (3, 1), (3, 3)]
    assert report["alone"] == "MTP + n-gram, K = 1"
    assert report["cached_tokens"] == 0
    assert report["model"] == report["config"]["model"] == model.name
    assert report["machine"]["command"] == (
        f"surefoot bench --server --model {model.name} --device cpu --dtype float32 --weights whole "
        "--drafters mtp+ngram --depths 1,3 --concurrency 1,3 --requests 3 --tokens 12 --rounds 2"
    )
    assert str(tmp_path) not in saved.read_text()


def test_wrong_texts_give_no_number(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved = tmp_path / "x.json"
    with serving(Engine.from_pretrained(model, slots=3, max_len=1500)) as live:
        assert call("--url", live.url, *SMALL).exit_code == 0
        keep_drafts_unseen(monkeypatch)
        line = refused(call("--url", live.url, *SMALL, "--json", saved), code=1)
    assert "not lossless, so nothing was measured: MTP, K = 3, 1 at once: request 0, character" in line
    assert not saved.exists()


@pytest.mark.parametrize(
    "arguments, named",
    [
        (("--server", "--batch", "2"), "--batch: expected it without --server"),
        (("--server", "--shape", "qwen3.5-9b"), "--shape"),
        (("--url", "http://127.0.0.1:9", "-m", "x"), "--model: expected it without --url"),
        (("--url", "ftp://x"), "url: expected http://host:port"),
        (("--url", "http://127.0.0.1:x"), "url: expected http://host:port"),
        (("--url", "http://127.0.0.1:9"), "url: expected a server, found none at 127.0.0.1:9"),
        (("--concurrency", "2"), "--concurrency: expected it with --server"),
        (("--requests", "2"), "--requests: expected it with --server"),
        (("--server", "--concurrency", "0"), "concurrency"),
        (("--server", "--concurrency", ","), "concurrency"),
        (("--server", "--requests", "0"), "requests"),
        (("--server", "--tokens", "1"), "tokens"),
        (("--server", "--drafters", "magic"), "drafters: expected one of none, ngram, suffix, mtp"),
        (("--server", "--depths", "0"), "draft_length"),
        (("--server", "--json", "/nowhere/x.json"), "--json"),
        (("--server", "--api-key", "x"), "--api-key: expected it with --url"),
        (("--api-key", "x"), "--api-key: expected it with --url"),
    ],
)
def test_options(arguments: tuple[str, ...], named: str) -> None:
    assert named in refused(call(*arguments))


def test_what_the_server_says_is_passed_on() -> None:
    line = refused(call("--server", "-m", "/nowhere"))
    assert "/nowhere" in line
    assert not line.startswith("error: error")


def test_a_server_that_asks_for_a_key(model: Path) -> None:
    with serving(Engine.from_pretrained(model, slots=3, max_len=1500), api_keys=("secret",)) as live:
        assert "status 401" in refused(call("--url", live.url, *SMALL))
        assert "status 401" in refused(call("--url", live.url, "--api-key", "wrong", *SMALL))
        result = call("--url", live.url, "--api-key", "secret", *SMALL)
    assert result.exit_code == 0, result.stderr
    assert "secret" not in result.stdout


def test_what_the_server_refuses() -> None:
    with scripted("drafter: expected another", status=400) as url:
        assert "server: expected an answer, found status 400: 'drafter: expected another'" in refused(
            call("--url", url, *SMALL)
        )


@contextmanager
def scripted(stream: str, status: int = 200) -> Iterator[str]:
    """A server that has a model, and answers every request with these lines."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(200, json.dumps({"data": [{"id": "m"}]}))

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self._say(status, stream)

        def _say(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    "stream, said",
    [
        ('data: {"error": {"message": "the model gave NaN"}}\n\n', "the model gave NaN"),
        ('data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n', "found one without"),
        ("", "found one without"),
    ],
)
def test_streams_that_are_none(stream: str, said: str) -> None:
    with scripted(stream) as url:
        assert said in refused(call("--url", url, *SMALL))


def test_latencies() -> None:
    assert Latency.of([0.002]) == Latency(2.0, 2.0)
    assert Latency.of([i / 1000 for i in range(100, 0, -1)]) == Latency(50.5, 95.0)


def test_prompts_differ() -> None:
    count = 3 * len(held_out())
    assert len(set(prompts(count))) == count
    assert min(map(len, prompts(count))) > 500
