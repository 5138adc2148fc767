"""Count the tokens of a text and write their ids, the most frequent first, for `draft_vocab=N`.

    python training/count_tokens.py --text DIR/text/train.bin --tokenizer DIR/tokenizer/tokenizer.json \
        --without src/surefoot/bench/heldout.jsonl --out src/surefoot/models/surefoot-demo/draft_vocab.json

A text holds documents, each followed by one NUL byte; a plain file is one document. Documents that contain a text of
`--without` are not counted: drafts are measured on those.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from surefoot.drafters.vocabulary import count_tokens

BATCH = 512


def documents(path: Path, without: list[str]) -> Iterator[str]:
    """The documents that contain none of the texts."""
    for body in path.read_bytes().split(b"\x00"):
        text = body.decode("utf-8")
        if text and not any(other in text for other in without):
            yield text


def encoded(tokenizer: Tokenizer, texts: Iterator[str]) -> Iterator[list[int]]:
    """The token ids of each text."""
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == BATCH:
            yield from (encoding.ids for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False))
            batch = []
    yield from (encoding.ids for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False))


def main() -> None:
    parser = argparse.ArgumentParser(description="count tokens, most frequent first")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--without", type=Path, help="held-out texts, one JSON object with `text` a line")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    lines = arguments.without.read_text().splitlines() if arguments.without else []
    without = [json.loads(line)["text"] for line in lines]
    ids = count_tokens(encoded(tokenizer, documents(arguments.text, without)), tokenizer.get_vocab_size())
    arguments.out.write_text(json.dumps(ids) + "\n")
    print(f"{len(ids)} ids, the first {ids[:8]}")


if __name__ == "__main__":
    main()
