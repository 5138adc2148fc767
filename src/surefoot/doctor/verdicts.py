"""What a probe means."""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from surefoot.doctor.findings import Finding, listing
from surefoot.doctor.norms import Suspect
from surefoot.doctor.probe import EARLY, FINAL, LATE, LOWER, PRE_NORM, RAISE, SWAPPED, Control, Probe, Trial
from surefoot.loading.names import is_mtp

NO_BETTER = 0.9  # share of a blind guess's loss above which the text was not read
USELESS, WEAK = 0.1, 0.3  # acceptance of the first draft token below which something is wrong, or may be
ONCE, NEVER = "norm-shifted-twice", "norm-not-shifted"


def unprobed(suspects: Seq[Suspect]) -> Iterator[Finding]:
    """Suspects whose correction nobody tried."""
    for suspect in suspects:
        yield Finding(
            "warning",
            _code(suspect.shift),
            f"{listing(suspect.names)}: {suspect.reason}; loading adds 1 to what a Hugging Face file has",
            f"Run the probe (without --no-probe) to make sure; if so, {_correction(suspect.shift)}.",
        )


def of_decoder(probe: Probe) -> Iterator[Finding]:
    """Norms tried, and whether the text was understood at all."""
    if not math.isfinite(probe.loss):
        yield Finding(
            "error",
            "not-finite",
            "the model's loss over the text is not a number: weights are NaN or infinite, or overflow in this dtype",
            "Fetch the files again; if they are right, use --dtype bfloat16 or float32.",
        )
        return
    blind = probe.loss > NO_BETTER * probe.uniform
    for trial in probe.trials:
        if not (
            blind and trial.suspect.names == (FINAL,)
        ):  # who guesses does best to be unsure: that is no fault of it
            yield from _of_trial(trial)
    if blind:
        yield Finding(
            "warning",
            "text-not-read",
            f"the model's loss over the text is {probe.loss:.2f} nats a token, a blind guess has {probe.uniform:.2f}",
            "If these are no random weights, the files or their conversion are damaged: fetch them again.",
        )


def _of_trial(trial: Trial) -> Iterator[Finding]:
    suspect = trial.suspect
    names, told = listing(suspect.names), f"{trial.stored:.2f} nats a token as stored, {trial.corrected:.2f} corrected"
    if suspect.names == (FINAL,):
        if trial.confirmed:
            yield Finding(
                "warning",
                _code(suspect.shift),
                f"{names}: its weights seem 1 too high; loss over the text {told}",
                "Compare it with the original checkpoint (a final norm can be sharp by training); if it has lower "
                f"weights, {_correction(suspect.shift)}.",
            )
    elif trial.confirmed:
        sentence = f"{names}: {suspect.reason}; loss over the text {told}"
        yield Finding("error", _code(suspect.shift), sentence, f"{_capital(_correction(suspect.shift))}.")
    else:
        sentence = f"{names}: {suspect.reason}; but the text is read no worse with them as they are ({told})"
        yield Finding("note", "norm-unusual", sentence)


def of_head(probe: Probe, suspects: Seq[Suspect]) -> Iterator[Finding]:
    """The best control that beats the head as wired, if any does; else whether the head drafts."""
    first = probe.acceptance[0]
    winners = [control for control in probe.controls if control.wins]
    best = max(winners, key=lambda control: control.share.agreed, default=None)
    if best is not None:
        code, sentence, advice = _fault(best)
        yield Finding(
            "error",
            code,
            f"{sentence}: {best.share.rate:.0%} of first drafts are right that way, {first.rate:.0%} as wired",
            advice,
        )
        return
    if first.rate < USELESS:
        yield Finding(
            "error",
            "mtp-drafts-nothing",
            f"{first.rate:.0%} of the head's first drafts are the target's choice, and no "
            "other wiring does better: the head does not belong to these weights, or the text is unlike any they know",
            'Take the head from the same release as the weights; until then use drafter="ngram" or "none".',
        )
    elif first.rate < WEAK:
        yield Finding(
            "warning",
            "mtp-drafts-little",
            f"{first.rate:.0%} of the head's first drafts are the target's choice",
            'Try --text with text of your own; if it stays so, drafter="auto" or "ngram" may be faster.',
        )
    for suspect in suspects:
        if any(is_mtp(name) for name in suspect.names):
            yield Finding(
                "note",
                "norm-unusual",
                f"{listing(suspect.names)}: {suspect.reason}; but the head drafts no better without that",
            )


def _fault(control: Control) -> tuple[str, str, str]:
    if control.name == SWAPPED:
        return ("mtp-fc-swapped", "mtp.fc.weight has its halves swapped (the embedding's columns must stand first)",
                "Swap them: fc = torch.cat(fc.chunk(2, dim=1)[::-1], dim=1), and save the file again.")  # fmt: skip
    if control.name == PRE_NORM:
        return ("mtp-pre-norm", "the head drafts better from the hidden state before the final norm",
                "It was trained or converted for another wiring; take the head of the original release, whose input is "
                "behind the final norm.")  # fmt: skip
    if control.name in (EARLY, LATE):
        which = "at the token that it is given" if control.name == EARLY else "one token too far ahead"
        return ("mtp-shifted", f"the head aims {which}",
                "It was trained for another position; take the head of the original release.")  # fmt: skip
    shift = -1 if control.name == RAISE else 1
    which = "all norms of the MTP head" if control.name in (LOWER, RAISE) else control.name.removesuffix(" - 1")
    how = "1 too high, as if shifted once more" if shift == 1 else "1 too low"
    return _code(shift), f"{which}: weights are {how}", f"{_capital(_correction(shift))}."


def _code(shift: int) -> str:
    return ONCE if shift == 1 else NEVER


def _correction(shift: int) -> str:
    change = "subtract 1 from" if shift == 1 else "add 1 to"
    return f"{change} these weights, or convert the checkpoint again without that step"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
