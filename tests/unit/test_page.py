"""The chat page: its files, and the page in a headless Chromium against a small server of the test's own.

The browser's tests need `playwright` (the Python package) and Debian's `chromium`; without them they are skipped.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

STATIC = Path(str(resources.files("surefoot.server"))) / "static"
FILES = {name: (STATIC / name).read_text(encoding="utf-8") for name in ("index.html", "style.css", "app.js")}
KINDS = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript"}
Elements = list[tuple[str, dict[str, str | None]]]
VOID = {"meta", "link", "input"}
CHROMIUM = shutil.which("chromium")
STATS = {
    "model": "surefoot-demo", "slots": 8, "running": 2, "queued": 3, "tokens_per_second": 123.4,
    "proposed_by_position": [100, 80, 50], "accepted_by_position": [90, 40, 0],
}  # fmt: skip


class Tags(HTMLParser):
    """Every element with its attributes; complains about what is not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Elements = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()


@pytest.fixture(scope="module")
def elements() -> Elements:
    tags = Tags()
    tags.feed(FILES["index.html"])
    assert tags.open == []
    return tags.elements


class TestFiles:
    def test_nothing_comes_from_elsewhere(self, elements: Elements) -> None:
        for name, text in FILES.items():
            assert "//" not in re.sub(r"^\s*//.*$|\s// .*$", "", text, flags=re.MULTILINE), name
        links = [attributes.get(key) for _, attributes in elements for key in ("src", "href") if key in attributes]
        assert links == ["data:,", "static/style.css", "static/app.js", "#message"]

    def test_no_script_or_style_stands_in_the_page(self, elements: Elements) -> None:
        assert [tag for tag, _ in elements if tag == "style"] == []
        assert [attributes for _, attributes in elements if any(key[:2] == "on" for key in attributes)] == []
        assert all("src" in attributes for tag, attributes in elements if tag == "script")

    def test_no_text_becomes_markup(self) -> None:
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert word not in FILES["app.js"]

    def test_ids_are_there_once(self, elements: Elements) -> None:
        ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
        assert len(ids) == len(set(ids))
        used = re.findall(r'byId\("([^"]+)"\)', FILES["app.js"]) + re.findall(
            r"#([a-z][\w-]*)[^{};]*\{", FILES["style.css"]
        )
        assert set(used) <= set(ids)

    def test_every_field_has_a_label(self, elements: Elements) -> None:
        labelled = {attributes.get("for") for tag, attributes in elements if tag == "label"}
        fields = {attributes["id"] for tag, attributes in elements if tag in ("input", "select", "textarea")}
        assert fields == labelled


class Stub(ThreadingHTTPServer):
    """Serves the page, `STATS`, and as the answer whatever `script` gives; keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: Any = list
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.gone = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_GET(self) -> None:
        name = {"/": "index.html"}.get(self.path, self.path.removeprefix("/static/"))
        if self.path == "/stats":
            self.reply(200, "application/json", json.dumps(STATS).encode())
        elif name in FILES:
            self.reply(200, KINDS[Path(name).suffix], FILES[name].encode())
        else:
            self.reply(404, "text/plain", b"")

    def do_POST(self) -> None:
        self.server.keys.append(self.headers["Authorization"])
        self.server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        answer = self.server.script()
        if isinstance(answer, tuple):
            self.reply(answer[0], "application/json", json.dumps(answer[1]).encode())
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for part in answer:
                self.wfile.write(part)
                self.wfile.flush()
        except OSError:
            self.server.gone.set()

    def reply(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def event(body: object) -> bytes:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


def chunk(*pieces: tuple[str, str], reasoning: str = "", finish: str | None = None) -> bytes:
    delta = {"content": "" if reasoning else "".join(text for text, _ in pieces)}
    delta |= {"reasoning_content": reasoning} if reasoning else {}
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "surefoot": list(pieces)})


def ended(tokens: int = 5) -> bytes:
    usage = {
        "completion_tokens": tokens,
        "completion_tokens_details": {"drafted_tokens": 6, "accepted_tokens": 3},
    }
    return chunk(finish="stop") + event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"


PIECES = [
    ("Every", "mtp"),
    (" token", "mtp"),
    (" is", "bonus"),
    (" checked", "ngram"),
    (".", "replaced"),
    ("\n", "plain"),
]


def answer_slowly() -> Iterator[bytes]:
    """Every token a while after the last."""
    for piece in PIECES:
        time.sleep(0.01)
        yield chunk(piece)
    yield ended(len(PIECES))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no chromium")
    quiet = ["--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-component-update"]
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *quiet])
        yield browser
        browser.close()


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def tab(browser: Any) -> Any:
    page = browser.new_page()
    page.set_default_timeout(20_000)
    return page


@pytest.fixture
def page(tab: Any, stub: Stub) -> Iterator[Any]:
    """The page, opened anew; nothing may go wrong in it or be asked of anyone else."""
    said: list[str] = []

    def note(line: str, wanted: bool = True) -> None:
        if wanted and "responded with a status of" not in line:
            said.append(line)

    listeners = {
        "console": lambda line: note(line.text, line.type in ("error", "warning")),
        "pageerror": lambda error: note(str(error)),
        "request": lambda request: note(request.url, not request.url.startswith((stub.url, "data:", "about:"))),
    }
    tab.set_viewport_size({"width": 1200, "height": 800})
    tab.emulate_media(color_scheme="light")
    for name, listener in listeners.items():
        tab.on(name, listener)
    tab.goto(stub.url)
    yield tab
    tab.goto("about:blank")
    for name, listener in listeners.items():
        tab.remove_listener(name, listener)
    assert said == []


def send(page: Any, text: str) -> None:
    page.locator("#message").fill(text)
    page.locator("#message").press("Enter")


def settled(page: Any) -> None:
    page.locator("#stop:disabled").wait_for()


class TestPage:
    def test_tokens_are_coloured_by_origin(self, page: Any, stub: Stub) -> None:
        stub.script = answer_slowly
        send(page, "Hello")
        settled(page)
        shown = page.locator("#talk span").evaluate_all("all => all.map(one => [one.textContent, one.className])")
        assert [tuple(pair) for pair in shown] == PIECES
        assert page.locator("[data-count=mtp]").text_content() == "2"
        assert page.locator("[data-count=plain]").text_content() == "1"
        assert "6 tokens" in page.locator("#status").text_content()
        assert "3 of 6 drafts kept" in page.locator("#status").text_content()
        assert "tokens/s" in page.locator("#own-speed").text_content()
        assert page.locator("#spoken").text_content() == "Every token is checked.\n"

    def test_says_what_was_said_before(self, page: Any, stub: Stub) -> None:
        stub.script = answer_slowly
        for text in ("Hello", "More"):
            send(page, text)
            settled(page)
        asked = stub.requests[1]
        assert asked["messages"] == [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Every token is checked.\n"},
            {"role": "user", "content": "More"},
        ]
        assert asked["stream"] is True
        page.locator("#clear").click()
        assert page.locator("#talk").text_content() == ""
        send(page, "Anew")
        settled(page)
        assert len(stub.requests[2]["messages"]) == 1

    def test_settings(self, page: Any, stub: Stub) -> None:
        stub.script = answer_slowly
        send(page, "Hello")
        settled(page)
        for label, value in (("Temperature", "0.7"), ("Seed", "7"), ("Most tokens", "40"), ("Draft length", "5")):
            page.get_by_label(label).fill(value)
        page.get_by_label("Drafter").select_option("ngram")
        page.get_by_label("API key").fill("secret")
        send(page, "Hello")
        settled(page)
        first, second = ({key: request[key] for key in request if key not in ("messages", "stream", "stream_options")}
                         for request in stub.requests)  # fmt: skip
        assert first == {"temperature": 0, "max_tokens": 512}
        assert second == {"temperature": 0.7, "seed": 7, "max_tokens": 40, "draft_length": 5, "drafter": "ngram"}
        assert stub.keys == [None, "Bearer secret"]
        page.get_by_label("Most tokens").fill("0")
        send(page, "Hello")
        assert len(stub.requests) == 2
        assert page.get_by_label("Most tokens").evaluate("one => one === document.activeElement")

    @pytest.mark.parametrize("how", ["Escape", "button"])
    def test_stops(self, page: Any, stub: Stub, how: str) -> None:
        def endless() -> Iterator[bytes]:
            while not stub.gone.is_set():
                yield chunk(("on ", "mtp"))
                time.sleep(0.005)

        stub.script = endless
        send(page, "Hello")
        page.wait_for_selector("#talk span")
        if how == "button":
            page.locator("#stop").click()
        else:
            page.keyboard.press("Escape")
        settled(page)
        assert stub.gone.wait(5), "the server sees that the client went"
        assert page.locator("#status").text_content().startswith("Stopped: ")
        stub.script = answer_slowly
        send(page, "More")
        settled(page)
        assert stub.requests[1]["messages"][1]["content"].startswith("on ")
        assert page.locator("#message").evaluate("one => one === document.activeElement")

    def test_keys(self, page: Any, stub: Stub) -> None:
        stub.script = answer_slowly
        page.keyboard.type("one")  # the message has the focus
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        assert stub.requests == []
        page.keyboard.press("Enter")
        settled(page)
        assert stub.requests[0]["messages"][0]["content"] == "one\ntwo"
        page.keyboard.press("Enter")  # an empty message is none
        page.keyboard.press("Escape")
        assert len(stub.requests) == 1

    def test_everything_is_reached_by_tab(self, page: Any) -> None:
        reached = set()
        page.evaluate("document.activeElement.blur()")
        for _ in range(20):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        fields = {"temperature", "seed", "max-tokens", "drafter", "draft-length", "key"}
        assert {"clear", "talk", "message", "send", "SUMMARY"} | fields <= reached

    def test_markup_is_text(self, page: Any, stub: Stub) -> None:
        text = "<img src=x onerror=alert(1)><b>bold</b>&amp;"
        stub.script = lambda: iter([chunk((text, "mtp")), ended()])
        send(page, text)
        settled(page)
        assert page.locator("#talk .text").all_text_contents() == [text, text]
        assert page.locator("#talk img, #talk b").count() == 0

    def test_characters_cut_by_the_network(self, page: Any, stub: Stub) -> None:
        sent = chunk(("Grüße 🎉", "mtp")) + ended()
        stub.script = lambda: (sent[place : place + 1] for place in range(len(sent)))
        send(page, "Hello")
        settled(page)
        assert page.locator("#talk span").text_content() == "Grüße 🎉"

    def test_thoughts(self, page: Any, stub: Stub) -> None:
        stub.script = lambda: iter([chunk(("Hm.", "mtp"), reasoning="Hm."), chunk(("Yes", "bonus")), ended()])
        send(page, "Hello")
        settled(page)
        assert page.locator("#talk .thought").all_text_contents() == ["Hm."]
        send(page, "More")
        settled(page)
        assert stub.requests[1]["messages"][1] == {"role": "assistant", "content": "Yes", "reasoning_content": "Hm."}

    def test_other_drafters(self, page: Any, stub: Stub) -> None:
        stub.script = lambda: iter([chunk(("Hm.", "draft-model")), ended()])
        assert page.locator("#other-row").is_hidden()
        send(page, "Hello")
        settled(page)
        assert page.locator("#talk span").get_attribute("class") == "other"
        assert page.locator("#other-row").is_visible()

    @pytest.mark.parametrize(
        ("script", "expected"),
        [
            ((429, {"error": {"message": "queue: expected room, found none"}}), "queue: expected room, found none"),
            ((502, "oops"), "the server answered 502"),
            ([event({"error": {"message": "logits: not numbers"}})], "logits: not numbers"),
            ([], "broke off"),
        ],
    )
    def test_errors_are_told_and_the_message_comes_back(
        self, page: Any, stub: Stub, script: Any, expected: str
    ) -> None:
        stub.script = lambda: script
        send(page, "Hello")
        settled(page)
        assert expected in page.get_by_role("alert").text_content()
        assert page.locator("#message").input_value() == "Hello"
        assert page.locator("#talk").text_content() == ""
        stub.script = answer_slowly
        page.keyboard.press("Enter")
        settled(page)
        assert page.get_by_role("alert").text_content() == ""
        assert len(stub.requests[1]["messages"]) == 1

    def test_an_answer_that_breaks_off_keeps_its_text(self, page: Any, stub: Stub) -> None:
        stub.script = lambda: iter([chunk(("Half", "mtp"))])
        send(page, "Hello")
        settled(page)
        assert "broke off" in page.get_by_role("alert").text_content()
        assert page.locator("#talk span").text_content() == "Half"

    def test_numbers_of_the_server(self, page: Any) -> None:
        page.locator("#slots", has_text="2 of 8").wait_for()
        assert page.locator("#queue").text_content() == "3"
        assert page.locator("#server-speed").text_content() == "123.4 tokens/s"
        assert page.locator("#model").text_content() == "surefoot-demo"
        assert page.locator("#acceptance span").all_text_contents() == [
            "90 % (90 of 100)", "50 % (40 of 80)", "0 % (0 of 50)",
        ]  # fmt: skip
        widths = page.locator("#acceptance .bar div").evaluate_all("all => all.map(one => one.style.width)")
        assert widths == ["90%", "50%", "0%"]

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_contrast(self, page: Any, stub: Stub, scheme: str) -> None:
        """4.5 to 1 for text, as WCAG 2.2 (AA) wants it."""
        page.emulate_media(color_scheme=scheme)
        stub.script = lambda: iter([*map(chunk, PIECES), chunk(("x", "draft-model")), ended()])
        send(page, "Hello")
        settled(page)
        stub.script = lambda: (500, {"error": {"message": "no"}})
        send(page, "Hello")
        settled(page)
        shown = "h1, h2, p, label, dt, dd, li, span, summary, button, input, select, textarea, kbd, .text, #problem"
        for name, text, back in page.locator(shown).evaluate_all(COLOURS):
            assert contrast(text, back) >= 4.5, (name, text, back)

    @pytest.mark.parametrize("size", [(360, 640), (640, 360), (1920, 1080)])
    def test_fits(self, page: Any, stub: Stub, size: tuple[int, int]) -> None:
        page.set_viewport_size({"width": size[0], "height": size[1]})
        stub.script = lambda: iter([chunk(("x" * 500, "mtp")), ended()])
        send(page, "y" * 500)
        settled(page)
        assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
        for name in ("#message", "#send", "#stop"):
            page.locator(name).scroll_into_view_if_needed()
            box = page.locator(name).bounding_box()
            assert box["height"] >= 44, "large enough for a finger"
            assert 0 <= box["x"] <= box["x"] + box["width"] <= size[0]


# Each element's name, its colour and the colour behind it.
COLOURS = """all => all.filter(one => one.checkVisibility() && one.textContent + (one.value || '')).map(one => {
  let back = one;
  while (back && getComputedStyle(back).backgroundColor === 'rgba(0, 0, 0, 0)') back = back.parentElement;
  return [one.outerHTML.slice(0, 60), getComputedStyle(one).color, getComputedStyle(back).backgroundColor];
})"""


def contrast(first: str, second: str) -> float:
    """WCAG's contrast ratio of two CSS colours."""
    low, high = sorted(map(luminance, (first, second)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    """WCAG's relative luminance."""
    parts = [float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
    red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
