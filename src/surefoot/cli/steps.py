"""One step of the loop as a few words of coloured text. Without colours it says the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from surefoot.engine.loop import StepRecord
    from surefoot.loading.tokenizer import Tokenizer

Show = Callable[[int], str]

ACCEPTED, REJECTED, UNREAD, EXTRA, DIM = "green", "red strike", "bright_black strike", "bold blue", "bright_black"


def token_shower(tokenizer: Tokenizer | None) -> Show:
    """How to print one token: its text in quotes, or its id if it has no text of its own."""

    def show(token: int) -> str:
        text = "" if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)
        # A part of a character decodes to U+FFFD; the id says more.
        return f"#{token}" if not text or "\ufffd" in text else json.dumps(text, ensure_ascii=False)

    return show


def render(record: StepRecord, number: int, seconds: str, show: Show) -> Text:
    """Two lines: the step's number, cache and drafter; then each drafted token by what became of it, and the last one.

    `accepted` tokens were drafted and kept; the first `rejected` one was wrong and what follows it was never judged;
    the `replacement`, `bonus` or `token` (there was no draft) is the target's own.
    """
    draft, verdict = record.draft.tokens, record.verdict
    before = record.position - 1  # the last emitted token is read by the next window
    text = Text()
    text.append(f"step {number}", style="bold")
    text.append(f"  cache {before} → {before + record.emitted}", style=DIM)
    if record.draft.source:
        text.append(f"  {record.draft.source}", style=DIM)
    kept = f"kept {record.accepted} of {len(draft)}" if draft else "no draft"
    text.append(f"  {kept}{seconds}\n", style=DIM)
    ended = record.emitted <= verdict.accepted
    _group(text, "accepted", draft[: record.accepted], ACCEPTED, show)
    if ended:
        _group(text, "after the end", draft[record.emitted :], UNREAD, show)
        return text
    _group(text, "rejected", draft[verdict.accepted : verdict.accepted + 1], REJECTED, show)
    _group(text, "not judged", draft[verdict.accepted + 1 :], UNREAD, show)
    kind = "token" if not draft else "bonus" if verdict.accepted == len(draft) else "replacement"
    _group(text, kind, (verdict.token,), EXTRA, show)
    return text


def _group(text: Text, label: str, tokens: tuple[int, ...], style: str, show: Show) -> None:
    if not tokens:
        return
    text.append(f"  {label}", style=DIM)
    for token in tokens:
        text.append(" ")
        text.append(show(token), style=style)
