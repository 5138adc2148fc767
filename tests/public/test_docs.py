"""What a newcomer reads and runs: examples, code blocks, links, public names, and what no file may hold."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import surefoot

ROOT = Path(__file__).parents[2]
PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if page.exists()]
LINKED = [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "training/README.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_example_runs(
    example: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_example_is_short(example: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) < 60


@pytest.mark.parametrize(
    "page", [page for page in PAGES if BLOCK.search(page.read_text(encoding="utf-8"))], ids=name_of
)
def test_code_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The blocks of one page follow one another, as a reader types them."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "page"}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block.group(1), str(page), "exec"), names)


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_links_resolve(page: Path) -> None:
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    for target in LINK.findall(text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def anchors(page: Path) -> set[str]:
    """The names under which a page's headings can be linked to."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_public_names_are_what_can_be_imported() -> None:
    names: dict[str, object] = {}
    exec("from surefoot import *", names)
    assert set(names) - {"__builtins__"} == set(surefoot.__all__)
    assert dir(surefoot) == sorted(surefoot.__all__)
    assert all(getattr(surefoot, name) is names[name] for name in surefoot.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        surefoot.nothing  # noqa: B018  # the access itself is the test


def test_public_names_are_documented() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert [name for name in surefoot.__all__ if f"`{name}`" not in page] == []


# Written apart, so that this file does not hold them.
HOSTS = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "com"), ("anaconda", "org"))]
HOME = re.compile(r"(?<![\w.~-])/(?:home|Users)/[a-z][\w.-]*/|(?<![\w.~-])/root[/]", re.IGNORECASE)
MADE_OF_OTHERS_TEXT = ("tokenizer.json", ".jsonl")


def tracked_texts() -> dict[str, str]:
    """Git's files that are text of ours."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    texts = {}
    for name in filter(None, listed.stdout.split("\0")):
        file = ROOT / name
        if file.is_file() and not name.endswith(MADE_OF_OTHERS_TEXT) and b"\0" not in (raw := file.read_bytes()):
            texts[name] = raw.decode("utf-8", errors="replace")
    return texts


def test_no_registry_hosts_and_no_paths_of_a_machine() -> None:
    here = str(ROOT) + os.sep if len(ROOT.parts) > 2 else None
    found = []
    for name, text in tracked_texts().items():
        found += [f"{name}: {host}" for host in HOSTS if host in text]
        found += [f"{name}: {match}" for match in HOME.findall(text)]
        if here is not None and here in text:
            found.append(f"{name}: the checkout's own path")
    assert found == []


@pytest.mark.parametrize(
    "parts", [("see ", "home", "ada", "models"), ("", "root", "x"), ("in '", "Users", "Ada", "x'")]
)
def test_paths_of_a_machine_are_noticed(parts: tuple[str, ...]) -> None:
    assert HOME.search("/".join(parts))
