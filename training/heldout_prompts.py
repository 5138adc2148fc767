"""Choose short excerpts of validation files as benchmark prompts.

    python training/heldout_prompts.py --text DIR/text --tokenizer DIR/tokenizer.json \
        --out src/surefoot/bench/heldout.jsonl

Only files under permissive licences are used, at most one per file. Each line holds the kind, the
text (about 200 to 400 tokens), its source, path and licence.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

WANTED: dict[str, list[str]] = {
    "code": ["cpython-stdlib", "sympy", "scipy", "pandas", "django", "sqlalchemy"],
    "docs": ["python3.11-doc", "postgresql-doc-15", "python-scipy-doc"],
    "english": ["dict-wn", "erlang-doc", "rust-doc"],
}
SHORTEST, LONGEST = 200, 400


def excerpt(text: str, tokenizer: Tokenizer, key: str) -> str | None:
    """Whole lines from somewhere in the first half of the text, or None if it is too short."""
    lines = text.splitlines(keepends=True)
    share = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") / 2**32
    first = int(share * len(lines) / 2)
    while first and lines[first - 1].strip():  # begin after an empty line
        first -= 1
    target = SHORTEST + int(share * (LONGEST - SHORTEST) * 0.8)
    chosen = ""
    for line in lines[first:]:
        longer = len(tokenizer.encode(chosen + line).ids)
        if longer > LONGEST:
            break
        chosen += line
        if longer >= target:
            break
    size = len(tokenizer.encode(chosen).ids)
    return chosen if SHORTEST <= size <= LONGEST else None


def main() -> None:
    parser = argparse.ArgumentParser(description="choose held-out benchmark prompts")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    bodies = [b.decode("utf-8") for b in (arguments.text / "val.bin").read_bytes().split(b"\x00") if b]
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (arguments.text / "val.index.jsonl").read_text().splitlines()
    ]
    lines: list[str] = []
    for kind, sources in WANTED.items():
        per_source = -(-4 // len(sources)) if kind != "code" else 1
        taken = 0
        for source in sources:
            candidates = [(row, body) for row, body in zip(rows, bodies, strict=True) if row["source"] == source]
            candidates.sort(key=lambda item: hashlib.sha256(item[0]["path"].encode()).hexdigest())
            here = 0
            for row, body in candidates:
                if here == per_source or taken == (6 if kind == "code" else 3):
                    break
                text = excerpt(body, tokenizer, row["path"])
                if text is None:
                    continue
                entry = {"kind": kind, "text": text, "source": source, "path": row["path"], "licence": row["licence"]}
                lines.append(json.dumps(entry))
                here, taken = here + 1, taken + 1
    if len(lines) != 12:
        raise ValueError(f"prompts: expected 12, found {len(lines)}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} prompts")


if __name__ == "__main__":
    main()
