"""Texts to continue: held-out ones where there is a tokenizer, random tokens elsewhere."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import torch

from surefoot.errors import InputError
from surefoot.loading.tokenizer import Tokenizer

YOURS = "yours"  # the kind of prompts of a file that does not say


def held_out() -> list[dict[str, str]]:
    """The built-in texts: `kind` (code, docs, english) and `text`; none was trained on by the bundled checkpoint."""
    return _lines("heldout.jsonl")


def kinds() -> dict[str, list[str]]:
    """The built-in prompts by what is asked for: chat, code, edit, summary, extraction, mathematics, creative.

    They are texts to be gone on with, which a model without a chat template can do, too."""
    prompts: dict[str, list[str]] = {}
    for line in _lines("kinds.jsonl"):
        prompts.setdefault(line["kind"], []).append(line["text"])
    return prompts


def read_prompts(file: Path) -> dict[str, list[str]]:
    """Prompts by kind: of each line that is not empty the `text` of a JSON object, with its `kind` if it has one, or
    the line itself. Raises InputError for a file that cannot be read or has none."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts: {file}: expected a readable text, found: {error}") from error
    prompts: dict[str, list[str]] = {}
    for line in filter(str.strip, lines):
        kind, text = YOURS, line
        if line.startswith("{"):
            try:
                entry = json.loads(line)
                kind, text = entry.get("kind", YOURS), entry["text"]
            except (ValueError, KeyError) as error:
                raise InputError(f'--prompts: {file}: expected JSON objects with a "text", found {line!r}') from error
        if not isinstance(text, str) or not isinstance(kind, str) or not text:
            raise InputError(f'--prompts: {file}: expected "text" and "kind" to be text, found {line!r}')
        prompts.setdefault(kind, []).append(text)
    if not prompts:
        raise InputError(f"--prompts: {file}: expected at least one prompt, found none")
    return prompts


def text_prompts(tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """`count` prompts of exactly `length` tokens that differ in how they end. Each ends in another built-in text, with
    the texts before it in front; when all have been used they are cut a few tokens short and used again."""
    texts = [tokenizer.encode(line["text"]) for line in held_out()]
    prompts = []
    for number in range(count):
        last, cut = number % len(texts), number // len(texts)
        tokens = texts[last][: len(texts[last]) - 8 * cut] or texts[last]
        before = last - 1
        while len(tokens) < length:
            tokens = texts[before % len(texts)] + tokens
            before -= 1
        prompts.append(tokens[-length:])
    return prompts


def random_prompts(vocab_size: int, count: int, length: int) -> list[list[int]]:
    """`count` prompts of `length` random tokens, the same at every call."""
    return [random_tokens(vocab_size, length, seed) for seed in range(1, count + 1)]


def random_tokens(vocab_size: int, count: int, seed: int = 1) -> list[int]:
    """Random token ids, the same at every call."""
    tokens: list[int] = torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


def _lines(name: str) -> list[dict[str, str]]:
    """A file of this package, an object a line."""
    lines = resources.files("surefoot.bench").joinpath(name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
