"""Cache states: after any number of accepted drafts they are, bit for bit, those of plain decoding of the same text."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial

import torch
from torch import Tensor

from surefoot.drafters.draft_model import DraftTarget
from surefoot.drafters.none import NoDrafter
from surefoot.engine import loop
from surefoot.prove.report import Check, Section
from surefoot.prove.subject import Subject
from surefoot.sampling import SamplingParams
from surefoot.sequence import Sequence
from surefoot.types import Draft, Drafter, ResumableTarget, Window

WINDOWS = 2  # drafts in a row, with the same number accepted of each
ODD = 17  # tokens of the neighbour's prompt


class Partly:
    """Drafts tokens of which the first `right` are those of `text` (the plain output), and the others are not."""

    name = "partly right"

    def __init__(self, text: Seq[int], right: int, vocab_size: int) -> None:
        self.text, self.right, self.vocab_size = text, right, vocab_size

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        """The next tokens of the text, the later ones shifted."""
        drafts = []
        for sequence, depth in zip(sequences, depths, strict=True):
            done = len(sequence.output)
            tokens = self.text[done : done + depth]
            drafts.append(Draft(tuple(
                token if i < self.right else (token + 1) % self.vocab_size for i, token in enumerate(tokens)
            )))  # fmt: skip
        return drafts

    def observe(self, sequence: Sequence, position: int, hidden: Tensor | None) -> None:
        """It knows all there is."""

    def release(self, sequence: Sequence) -> None:
        """Nothing was kept."""


def prove_caches(subject: Subject) -> Section:
    """Accept 0 .. K drafts twice in a row, in one of two slots, for every K's deepest window; compare all caches."""
    depth = subject.settings.depths[-1]
    section = Section(
        "cache states",
        f"After accepting 0 to {depth} of {depth} drafts, twice in a row, lengths, keys and values, recurrent states "
        "and convolution inputs (those that the model has), and the next logits are bit for bit those of plain "
        "decoding; the other slot is untouched.",
    )
    with torch.inference_mode():
        plain: list[Plain] = []
        section.check("plain decoding", lambda: _plain(subject, (depth + 1) * WINDOWS + 1, plain))
        if plain:
            for right in range(depth + 1):
                name = f"{right} of {depth} drafts accepted"
                section.check(name, partial(_after, subject, name, plain[0], depth, right))
            section.check("control: one token stale", lambda: _stale(subject, plain[0]))
        section.check("returning to a mark", lambda: _mark(subject))
        _keep(subject, section)
    return section


class Plain:
    """Plain decoding of a prompt: its tokens, and lengths, states and logits after each step."""

    def __init__(self, prompt: list[int], tokens: list[int]) -> None:
        self.prompt, self.tokens = prompt, tokens
        self.states: list[list[Tensor]] = []
        self.rows: list[Tensor] = []


def _prompt(subject: Subject) -> list[int]:
    return subject.prompts[0][-48:]


def _start(subject: Subject, drafter: Drafter, tokens: int) -> tuple[DraftTarget, Sequence]:
    """A target of two slots with a neighbour in the second, and a sequence whose prompt has been read in the first."""
    target, prompt = subject.target(2), _prompt(subject)
    neighbour = [(31 * i + 7) % target.vocab_size for i in range(ODD)]
    for _ in target.prefill(1, neighbour):
        pass
    params = SamplingParams(max_new_tokens=tokens)
    sequence = Sequence(0, list(prompt), params, len(prompt) + tokens)
    for _ in loop.prefill(sequence, drafter, target):
        pass
    return target, sequence


def _plain(subject: Subject, tokens: int, into: list[Plain]) -> Check:
    drafter = NoDrafter()
    target, sequence = _start(subject, drafter, tokens)
    plain = Plain(list(sequence.tokens), [])
    for _ in range(tokens):
        plain.states.append(_copied(subject, 0))
        loop.step([sequence], drafter, target, 0)
    plain.tokens = sequence.output
    # The rows again, by windows of one: what the engine's own steps read.
    target, _ = _start(subject, drafter, tokens)
    for token in (plain.prompt[-1], *plain.tokens[:-1]):
        plain.rows.append(target.verify([Window(0, (token,))])[0].logits[0].clone())
        target.commit(0, 1)
    chosen = [int(row.argmax()) for row in plain.rows]
    into.append(plain)
    return Check(
        "plain decoding", chosen == plain.tokens, f"{tokens} tokens, its own rows' argmax: {chosen == plain.tokens}"
    )


def _after(subject: Subject, name: str, plain: Plain, depth: int, right: int) -> Check:
    drafter = Partly(plain.tokens, right, subject.vocab_size)
    target, sequence = _start(subject, drafter, len(plain.tokens))
    beside = _copied(subject, 1)
    accepted = []
    for _ in range(WINDOWS):
        accepted += [record.verdict.accepted for record in loop.step([sequence], drafter, target, depth)]
    problems = [] if accepted == [right] * WINDOWS else [f"accepted {accepted}, expected {right} each time"]
    emitted = len(sequence.output)
    if sequence.output != plain.tokens[:emitted]:
        problems.append("tokens differ from plain decoding's")
    length, due = subject.length(0), len(sequence.tokens) - 1
    if length != due:
        problems.append(f"length {length}, expected {due}")
    if emitted < len(plain.states):
        problems += _differences(subject, 0, plain.states[emitted])
        row = target.verify([Window(0, (sequence.tokens[-1],))])[0].logits[0]
        if not torch.equal(row, plain.rows[emitted]):
            problems.append(f"the next logits differ by {(row - plain.rows[emitted]).abs().max().item():.3g}")
        target.commit(0, 1)
    problems += [f"the other slot: {text}" for text in _differences(subject, 1, beside)]
    tensors = len(plain.states[0])
    return Check(
        name,
        not problems,
        "; ".join(problems) or f"{tensors} tensors equal after {emitted} tokens, and the next logits",
    )


def _copied(subject: Subject, slot: int) -> list[Tensor]:
    return [tensor.clone() for _, tensor in subject.state(slot)]


def _differences(subject: Subject, slot: int, expected: Seq[Tensor]) -> list[str]:
    """The first tensor of the slot's state that is not the expected one."""
    for (layer, ours), due in zip(subject.state(slot), expected, strict=True):
        if ours.shape != due.shape:
            return [f"{layer}: {list(ours.shape)}, expected {list(due.shape)}"]
        if not torch.equal(ours, due):
            return [f"{layer} differs by {(ours - due).abs().max().item():.3g}"]
    return []


def _stale(subject: Subject, plain: Plain) -> Check:
    """A state that is one token old must be noticed."""
    name = "control: one token stale"
    target, sequence = _start(subject, NoDrafter(), len(plain.tokens))
    target.verify([Window(0, (sequence.tokens[-1], *plain.tokens[:2]))])
    target.commit(0, 2)
    return Check(
        name, bool(_differences(subject, 0, plain.states[3])), "a commit of two tokens is told from one of three"
    )


def _mark(subject: Subject) -> Check:
    name = "returning to a mark"
    target, sequence = _start(subject, NoDrafter(), 8)
    before, length = _copied(subject, 0), subject.length(0)
    target.mark(0)
    target.verify([Window(0, (sequence.tokens[-1], 1, 2))])
    target.commit(0, 2)
    target.rewind(0)
    problems = _differences(subject, 0, before)
    if subject.length(0) != length:
        problems.insert(0, f"length {subject.length(0)}, expected {length}")
    return Check(name, not problems, "; ".join(problems) or f"the state of {length} tokens is back, bit for bit")


def _keep(subject: Subject, section: Section) -> None:
    name = "putting back what was kept of a prompt"
    target, prompt = subject.target(2), _prompt(subject)
    if isinstance(target, ResumableTarget):
        section.check(name, lambda: _put_back(subject, target, name, prompt))
    else:
        section.notes.append(f"not applicable: {name} (of this target nothing is kept)")


def _put_back(subject: Subject, target: ResumableTarget, name: str, prompt: list[int]) -> Check:
    for _ in target.prefill(0, prompt):
        pass
    before = _copied(subject, 0)
    kept = target.keep(0, 0, len(prompt))
    for _ in target.prefill(0, prompt[:1]):  # something else in between
        pass
    for _ in target.resume(0, prompt, [kept]):
        pass
    problems = _differences(subject, 0, before)
    return Check(name, not problems, "; ".join(problems) or f"{len(prompt)} tokens, bit for bit")
