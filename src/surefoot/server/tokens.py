"""Log-probabilities as the APIs show them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

from surefoot.loading.tokenizer import Tokenizer
from surefoot.sequence import TokenLogprobs


def chat_logprobs(entries: Seq[TokenLogprobs], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """A chat's `logprobs.content`: an entry per token."""
    return [
        _named(entry.token, entry.logprob, tokenizer)
        | {"top_logprobs": [_named(token, logprob, tokenizer) for token, logprob in entry.top]}
        for entry in entries
    ]


def completion_logprobs(
    entries: Seq[TokenLogprobs | None], tokenizer: Tokenizer, offset: int, first: int = 0
) -> dict[str, Any]:
    """A completion's `logprobs`: four lists, an entry each per token; texts begin at `offset`. Of tokens with the same
    text the likeliest is shown. None stands for the `first` token of a prompt."""
    texts, offsets, logprobs = [], [], []
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        text = _text(first if entry is None else entry.token, tokenizer)
        texts.append(text)
        offsets.append(offset)
        offset += len(text)
        logprobs.append(None if entry is None else _finite(entry.logprob))
        if entry is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            top.setdefault(_text(token, tokenizer), _finite(logprob))
        tops.append(top)
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def prompt_logprobs(entries: Seq[TokenLogprobs | None], tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt, log-probabilities by token id."""
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": _finite(logprob), "decoded_token": _text(token, tokenizer)}
            for token, logprob in (*entry.top, (entry.token, entry.logprob))
        }
        for entry in entries
    ]


def _finite(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, -9999.0)


def _named(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {"token": _text(token, tokenizer), "logprob": _finite(logprob), "bytes": _bytes(token, tokenizer)}


def _text(token: int, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([token], skip_special_tokens=False)


def _bytes(token: int, tokenizer: Tokenizer) -> list[int] | None:
    """A token's bytes, of which a character may need several tokens; those of its text if it is not spelt in bytes."""
    spelling = tokenizer.backend.id_to_token(token)
    if spelling is None:
        return None
    table = _byte_letters()
    text = _text(token, tokenizer)
    if text != spelling and all(letter in table for letter in spelling):
        return [table[letter] for letter in spelling]
    return list(text.encode())


@cache
def _byte_letters() -> dict[str, int]:
    """The letters that byte-level tokenizers (GPT-2's way) write bytes with: printable ones stand for themselves."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + place): byte for place, byte in enumerate(others)}
