"""Is the engine's target the model that the checkpoint describes? Its logits beside the textbook reference's."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from surefoot.engine.target import DecoderTarget
from surefoot.model import MTPHead
from surefoot.model.spans import Layout
from surefoot.prove.identity import GREEDY
from surefoot.prove.reference import Reference
from surefoot.prove.report import Check, Section
from surefoot.prove.subject import CheckpointSubject, Subject
from surefoot.types import Target, Window

WINDOWS = ((1, 1), (3, 3), (4, 2), (2, 1), (5, 4), (1, 1), (4, 1), (3, 2))  # (tokens read, tokens kept)
MOST_TOKENS = 128
CHUNK = 16
BOOK = "a plain float32 implementation that shares nothing with the engine"
LIBRARY = "the library's own pass over the whole text in float32, without a cache"


def prove_parity(subject: Subject) -> Section:
    """Prompts, windows with refused drafts, the tokens of plain decoding; of a checkpoint its MTP head; a control."""
    own = isinstance(subject, CheckpointSubject)
    section = Section(
        "textbook reference" if own else "library reference",
        f"The logits are those of {BOOK if own else LIBRARY}, up to rounding: {subject.tolerance:g} of their standard "
        "deviation.",
    )
    with torch.inference_mode():
        tokens = [token for prompt in subject.prompts for token in prompt][:MOST_TOKENS]
        tokens = (tokens * (1 + 40 // len(tokens)))[: max(40, len(tokens))]
        if isinstance(subject, CheckpointSubject):
            _of_a_checkpoint(section, subject, tokens)
        else:
            _of_a_guest(section, subject, tokens)
    return section


def _of_a_checkpoint(section: Section, subject: CheckpointSubject, tokens: list[int]) -> None:
    hidden = subject.reference.hidden(tokens)
    expected = subject.reference.logits(hidden)
    chunked = DecoderTarget(subject.model.decoder, 1, CHUNK)
    whole = "a prompt read at once"
    section.check(whole, lambda: _prompt(subject, whole, subject.target(1), tokens, expected))
    pieces = f"a prompt read {CHUNK} tokens at a time"
    section.check(pieces, lambda: _prompt(subject, pieces, chunked, tokens, expected))
    section.check("windows with refused drafts", lambda: _windows(subject, chunked, tokens, expected))
    section.check("tokens of plain decoding", lambda: _output(subject))
    if subject.model.head is not None:
        head = subject.model.head
        section.check("MTP head", lambda: _head(subject, head, hidden, tokens))
    section.check("control: a norm without its 1 +", lambda: _wrong_norm(subject, tokens[:16], expected[:16]))
    section.notes.append(subject.source)


def _of_a_guest(section: Section, subject: Subject, tokens: list[int]) -> None:
    expected = subject.expected(tokens)
    section.check("prompts read at once", lambda: _ends(subject, "prompts read at once"))
    section.check("windows with refused drafts", lambda: _windows(subject, subject.target(1), tokens, expected))
    section.check("tokens of plain decoding", lambda: _output(subject))
    section.check("control: another first token", lambda: _other_text(subject, tokens, expected))
    section.notes.append("not applicable: the textbook has Qwen3.5's family only")


def _compared(subject: Subject, name: str, ours: Tensor, expected: Tensor) -> Check:
    ours = ours.float().cpu()
    worst = ((ours - expected).abs().max() / expected.std()).item()
    return Check(name, worst <= subject.tolerance,  # not for NaN
                 f"{len(expected)} rows, worst difference {worst:.2g} of the standard deviation, expected at most "
                 f"{subject.tolerance:g}")  # fmt: skip


def _prompt(subject: Subject, name: str, target: DecoderTarget, tokens: list[int], expected: Tensor) -> Check:
    return _compared(subject, name, target.score(tokens), expected)


def _ends(subject: Subject, name: str) -> Check:
    """What follows each prompt."""
    ours = torch.stack([subject.row(prompt, ()) for prompt in subject.prompts])
    return _compared(subject, name, ours, torch.cat([subject.expected(p, len(p) - 1) for p in subject.prompts]))


def _windows(subject: Subject, target: Target, tokens: list[int], expected: Tensor) -> Check:
    """Behind a prompt of two chunks, windows of several sizes, of which a part is kept, until the text ends."""
    done = start = CHUNK + 3
    for _ in target.prefill(0, tokens[:done]):
        pass
    rows, turn = [], 0
    while done + 1 <= len(tokens):
        size, keep = WINDOWS[turn % len(WINDOWS)]
        keep = min(keep, len(tokens) - done)
        wrong = [(token + 1) % target.vocab_size for token in (tokens * 2)[done + keep : done + size]]
        window = [*tokens[done : done + keep], *wrong]
        rows.append(target.verify([Window(0, tuple(window))])[0].logits[:keep].clone())
        target.commit(0, keep)
        done, turn = done + keep, turn + 1
    target.release(0)
    return _compared(subject, "windows with refused drafts", torch.cat(rows), expected[start:])


def _output(subject: Subject) -> Check:
    """Each greedy token of the engine is the reference's best, or as good as that."""
    name = "tokens of plain decoding"
    prompt = subject.prompts[0][-64:]
    params = replace(GREEDY, max_new_tokens=subject.settings.new_tokens)
    output = subject.plain().generate(prompt, params).token_ids
    rows = subject.expected([*prompt, *output[:-1]], len(prompt) - 1)
    behind = (rows.amax(-1) - rows.gather(1, torch.tensor(output)[:, None])[:, 0]) / rows.std()
    best = int((behind == 0).sum())
    worst = behind.max().item()
    return Check(name, worst <= 2 * subject.tolerance,
                 f"{best} of {len(output)} are the reference's best; the worst is {worst:.2g} of the standard "
                 f"deviation behind it, expected at most {2 * subject.tolerance:g}")  # fmt: skip


def _head(subject: CheckpointSubject, head: MTPHead, hidden: Tensor, tokens: list[int]) -> Check:
    """The head's logits, from the reference's hidden states, read at once and in windows. A fault here costs
    acceptance, not tokens."""
    decoder, following = head.decoder, tokens[1:]
    book = subject.reference
    expected = book.logits(book.draft(hidden[:-1], following))
    own = hidden[:-1].to(decoder.device)
    lane, split = head.build_lane(1), len(following) // 2
    parts = [head.prefill(own[:split], following[:split], lane, 0, 0)]
    for start in range(split, len(following), 3):
        stop = min(start + 3, len(following))
        layout = Layout.of([(0, start, stop - start)], decoder.device, decoder.linear.least_rows)
        parts.append(head.decode(own[start:stop], following[start:stop], lane, layout)[: stop - start])
    return _compared(subject, "MTP head", decoder.bulk_logits(torch.cat(parts)), expected)


def _wrong_norm(subject: CheckpointSubject, tokens: list[int], expected: Tensor) -> Check:
    """What the comparison is for: a scale of w in the place of 1 + w must stand out."""
    book = subject.reference
    other = Reference(book.config, book.read, scale_of=lambda w: w)
    found = _compared(subject, "", other.logits(other.hidden(tokens)), expected)
    return Check("control: a norm without its 1 +", not found.passed, found.seen.replace("at most", "more than"))


def _other_text(subject: Subject, tokens: list[int], expected: Tensor) -> Check:
    """What the comparison is for: a context of which one token is another must stand out."""
    other = subject.expected([(tokens[0] + 1) % subject.vocab_size, *tokens[1:]])
    found = _compared(subject, "", other[1:], expected[1:])
    return Check("control: another first token", not found.passed, found.seen.replace("at most", "more than"))
