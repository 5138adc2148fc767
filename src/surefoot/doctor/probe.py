"""The weights at work: the target reads a text, and the MTP head drafts along it, as wired and otherwise on purpose.

Teacher-forced: every token that is read is the text's. The head's row of position p has the target's hidden state there
and token p + 1; its draft is right if the target, having read the text up to p + 1, would choose the same token. The
draft of position k stands k - 1 chained rows further on: these have the head's own hidden states. A wiring fault leaves
the output right and drafts wrong, so nobody sees it; but then one of the controls drafts better than the head as it is
wired. (A probe without a speculation loop: Qwen3.5 implementations have used it to find each of these faults.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.bench.prompts import held_out
from surefoot.doctor.norms import Suspect, is_centred
from surefoot.errors import InputError
from surefoot.kernels.linear import LinearFactory
from surefoot.kernels.norm import RMSNorm
from surefoot.kernels.quantise import Weight
from surefoot.loading.checkpoint import MtpPolicy, load_checkpoint
from surefoot.loading.names import is_mtp
from surefoot.loading.tokenizer import Tokenizer
from surefoot.model import Decoder, MTPHead, build_cache
from surefoot.model.spans import Layout
from surefoot.model.tensors import whole

CHAINS = 16  # chains in one pass: as many rows as a GPU's pass has
LOGIT_ROWS = 64  # rows of logits at once: a vocabulary of 248320 makes 64 MB of them
WINDOW = 512  # tokens of a text that are read behind one another
SURE = 3.0  # standard errors by which a control must win; a healthy head's controls are expected to lose
WORTH = 0.02  # and the share of the drafts, or it would not be worth a word

SWAPPED, PRE_NORM = "fc halves swapped", "pre-norm hidden state"
EARLY, LATE = "target one token earlier", "target one token later"
LOWER, RAISE = "norms - 1", "norms + 1"
FINAL = "model.norm.weight"

Tensors = Mapping[str, Weight]


@dataclass(frozen=True)
class Share:
    """`agreed` of `of` drafts are the target's choice."""

    agreed: int
    of: int

    @property
    def rate(self) -> float:
        """0 if there were none."""
        return self.agreed / self.of if self.of else 0.0


@dataclass(frozen=True)
class Control:
    """The first draft position in another wiring: drafts right only there (`gained`) and only as wired (`lost`)."""

    name: str
    share: Share
    gained: int
    lost: int

    @property
    def wins(self) -> bool:
        """Beyond chance (were they alike, a fair coin would decide each draft in which they differ) and by enough."""
        more = self.gained - self.lost
        return more > SURE * math.sqrt(self.gained + self.lost) and more > WORTH * self.share.of


@dataclass(frozen=True)
class Trial:
    """The decoder's loss (nats a token) with suspected norms as stored and corrected; `sure`: the difference in
    standard errors, positive if the correction helps."""

    suspect: Suspect
    stored: float
    corrected: float
    sure: float

    @property
    def confirmed(self) -> bool:
        """Whether the correction helps beyond chance."""
        return self.sure > SURE


@dataclass(frozen=True)
class Probe:
    """What the weights did with `tokens` tokens of text. `loss` in nats a token, `uniform` that of a blind guess;
    `trials`: suspected norms of the decoder; `acceptance`: by draft position, empty without a head; `controls`: of the
    first position."""

    tokens: int
    loss: float
    uniform: float
    trials: list[Trial]
    acceptance: list[Share]
    controls: list[Control]


@dataclass(frozen=True)
class Reading:
    """What the target makes of a text of T tokens: `losses` [T - 1] of the tokens after the first, `choices` [T],
    post-norm `hidden` [T, H] and what was `raw` [T, H] before that norm."""

    losses: Tensor
    choices: Tensor
    hidden: Tensor
    raw: Tensor


def built_in(tokenizer: Tokenizer, tokens: int) -> list[list[int]]:
    """Held-out texts, about so many tokens together, kinds in turn."""
    by_kind: dict[str, list[str]] = {}
    for line in held_out():
        by_kind.setdefault(line["kind"], []).append(line["text"])
    turns = max(map(len, by_kind.values()))
    texts = [texts[turn] for turn in range(turns) for texts in by_kind.values() if turn < len(texts)]
    return cut((tokenizer.encode(text) for text in texts), tokens)


def cut(texts: Iterable[Seq[int]], tokens: int) -> list[list[int]]:
    """The first `tokens` tokens of lists of tokens, in windows."""
    windows: list[list[int]] = []
    left = tokens
    for text in texts:
        for start in range(0, len(text), WINDOW):
            window = list(text[start : start + min(WINDOW, left)])
            left -= len(window)
            if len(window) > 1:
                windows.append(window)
            if left <= 0:
                return windows
    return windows


@dataclass(frozen=True)
class Subject:
    """A loaded checkpoint, its head's tensors apart. `size`: tokens that may be chosen."""

    decoder: Decoder
    mtp: dict[str, Weight]
    final: Tensor
    size: int

    @classmethod
    def load(
        cls, folder: Path, mtp: MtpPolicy, device: torch.device, dtype: torch.dtype, max_len: int,
        shifts: Mapping[str, int], size: int,
    ) -> Subject:  # fmt: skip
        """With `shifts` taken off the norms that it names. Raises CheckpointError, or InputError without room."""
        loaded = load_checkpoint(folder, mtp=mtp, dtype=dtype, device=device)
        tensors = loaded.tensors | _lowered(loaded.tensors, shifts)
        loaded.tensors.clear()
        head = {name: tensors.pop(name) for name in list(tensors) if is_mtp(name)}
        final = whole(tensors, FINAL).float()
        decoder = Decoder(loaded.config, tensors, max_len, LinearFactory(pack=device.type == "cpu"))
        return cls(decoder, head, final, size)

    def read(self, tokens: Seq[int]) -> Reading:
        """The text, from an empty cache."""
        decoder = self.decoder
        cache = build_cache(decoder.config, 1, len(tokens), decoder.dtype, decoder.device)
        x = decoder.embed(torch.tensor(tokens, device=decoder.device))
        decoder.read(decoder.blocks, cache.layers, x, 0, 0)
        return self.judge(x, decoder.norm, tokens)

    def judge(self, raw: Tensor, norm: RMSNorm, tokens: Seq[int]) -> Reading:
        """From the last layer's output and a final norm."""
        hidden = norm(raw)
        following = torch.tensor(tokens[1:], device=hidden.device)
        losses, choices = [], []
        for start in range(0, len(tokens), LOGIT_ROWS):
            logits = self._logits(hidden[start : start + LOGIT_ROWS])
            choices.append(logits.argmax(-1))
            wanted = following[start : start + LOGIT_ROWS]
            losses.append(F.cross_entropy(logits[: len(wanted)], wanted, reduction="none"))
        return Reading(torch.cat(losses), torch.cat(choices), hidden, raw)

    def choose(self, hidden: Tensor) -> Tensor:
        """The likeliest tokens [n] of post-norm states [n, H]."""
        return torch.cat([self._logits(part).argmax(-1) for part in hidden.split(LOGIT_ROWS)])

    def _logits(self, hidden: Tensor) -> Tensor:
        padded = F.pad(hidden, (0, 0, 0, max(0, 2 - len(hidden))))  # a product of one row is another one
        return self.decoder.bulk_logits(padded)[: len(hidden), : self.size]


@torch.inference_mode()
def probe(
    folder: Path, windows: Seq[Seq[int]], suspects: Seq[Suspect], *, with_head: bool, depth: int,
    device: torch.device, dtype: torch.dtype, size: int,
) -> Probe:  # fmt: skip
    """Read the windows, try suspected norms of the decoder corrected, then draft with the head. Raises CheckpointError,
    or InputError if the windows hold nothing to judge or memory has no room."""
    if not any(len(window) > depth + 1 for window in windows):
        raise InputError(f"text: expected more than {depth + 1} tokens, found {max(map(len, windows), default=0)}")
    max_len = max(map(len, windows)) + depth + 1
    of_decoder = [one for one in suspects if not any(is_mtp(name) for name in one.names) and one.names != (FINAL,)]
    trials: list[Trial] = []

    def load(shifts: Mapping[str, int]) -> Subject:
        return Subject.load(folder, "require" if with_head else "skip", device, dtype, max_len, shifts, size)

    subject = load({})
    readings = [subject.read(window) for window in windows]
    shifts: dict[str, int] = {}  # confirmed ones stay: the rest is to be judged on what the target was meant to be
    for suspect in of_decoder:
        del subject  # there may be no room for two
        tried = shifts | dict.fromkeys(suspect.names, suspect.shift)
        subject = load(tried)
        corrected = [subject.read(window) for window in windows]
        trials.append(_trial(suspect, readings, corrected))
        if trials[-1].confirmed:
            shifts, readings = tried, corrected
    if FINAL not in shifts:
        trials.append(_final_trial(subject, readings, windows))
    losses = torch.cat([reading.losses for reading in readings])
    acceptance: list[Share] = []
    controls: list[Control] = []
    if with_head and losses.isfinite().all():
        acceptance, controls = _judge_head(subject, windows, readings, depth)
    tokens, uniform = sum(map(len, windows)), math.log(size)
    return Probe(tokens, losses.mean().item(), uniform, trials, acceptance, controls)


def _trial(suspect: Suspect, stored: Seq[Reading], corrected: Seq[Reading]) -> Trial:
    before, after = (torch.cat([reading.losses for reading in each]).double() for each in (stored, corrected))
    gain = before - after
    error = gain.std().item() / math.sqrt(len(gain)) if len(gain) > 1 else math.inf
    return Trial(suspect, before.mean().item(), after.mean().item(), gain.mean().item() / max(error, 1e-9))


def _final_trial(subject: Subject, readings: Seq[Reading], windows: Seq[Seq[int]]) -> Trial:
    """The final norm has no siblings to differ from, so it is tried always; no layer need be run again."""
    norm = RMSNorm(subject.final, subject.decoder.config.norm_eps)  # 1 + (w - 1)
    lowered = [subject.judge(read.raw, norm, window) for read, window in zip(readings, windows, strict=True)]
    return _trial(Suspect((FINAL,), 1, "tried in any case"), readings, lowered)


def _judge_head(
    subject: Subject, windows: Seq[Seq[int]], readings: Seq[Reading], depth: int
) -> tuple[list[Share], list[Control]]:
    head = MTPHead(subject.decoder, dict(subject.mtp))
    wanted = torch.cat([reading.choices[1:] for reading in readings])
    hits = [torch.zeros(0, dtype=torch.bool)] * depth
    drafts = []
    for window, reading in zip(windows, readings, strict=True):
        chained = chain(head, reading.hidden, window, depth)
        chosen = [subject.choose(hidden) for hidden in chained]
        drafts.append(chosen[0])
        for step, tokens in enumerate(chosen):
            target = reading.choices[step + 1 : step + 1 + len(tokens)]
            hits[step] = torch.cat([hits[step], (tokens == target).cpu()])
    acceptance = [Share(int(hit.sum()), len(hit)) for hit in hits]
    right = torch.cat(drafts) == wanted
    return acceptance, [
        *(_control(name, right, _draft(subject, MTPHead(subject.decoder, changed), windows, readings) == wanted)
          for name, changed in _rewired(subject.mtp).items()),
        _control(PRE_NORM, right, _draft(subject, head, windows, readings, raw=True) == wanted),
        *_shifted(drafts, readings, right),
    ]  # fmt: skip


def chain(head: MTPHead, hidden: Tensor, tokens: Seq[int], depth: int) -> list[Tensor]:
    """The head's post-norm states along a text of T tokens, for draft positions 1 to `depth`: [T - 1, H] for the first,
    [n, H] for the others, for chains that begin at positions 0, 1, ... and whose tokens the text has."""
    decoder = head.decoder
    lane = head.build_lane(1 + CHAINS)
    first = head.prefill(hidden[:-1], tokens[1:], lane, 0, 0)
    further: list[list[Tensor]] = [[] for _ in range(depth - 1)]
    starts = max(0, len(tokens) - depth)
    for start in range(0, starts, CHAINS):
        begins = range(start, min(start + CHAINS, starts))
        lane.keys[1:], lane.values[1:] = lane.keys[:1], lane.values[:1]  # rows of the target's states, all of them
        state = first[begins.start : begins.stop]
        for step in range(1, depth):
            spans = [(1 + slot, begin + step, 1) for slot, begin in enumerate(begins)]
            layout = Layout.of(spans, decoder.device, decoder.linear.least_rows)
            state = head.decode(state, [tokens[begin + step + 1] for begin in begins], lane, layout)[: len(begins)]
            further[step - 1].append(state)
    empty = first[:0]
    return [first, *(torch.cat([empty, *states]) for states in further)]


def _draft(
    subject: Subject, head: MTPHead, windows: Seq[Seq[int]], readings: Seq[Reading], raw: bool = False
) -> Tensor:
    """The first draft tokens along all windows, from hidden states behind the final norm or before it."""
    drafts = []
    for window, reading in zip(windows, readings, strict=True):
        hidden = reading.raw if raw else reading.hidden
        out = head.prefill(hidden[:-1], window[1:], head.build_lane(1), 0, 0)
        drafts.append(subject.choose(out))
    return torch.cat(drafts)


def _rewired(mtp: Tensors) -> dict[str, dict[str, Weight]]:
    """The head's tensors changed in one way each."""
    fc = whole(mtp, "mtp.fc.weight")
    norms = [name for name in mtp if is_centred(name)]
    changed: dict[str, Tensors] = {SWAPPED: {"mtp.fc.weight": fc.roll(fc.shape[1] // 2, 1)}}
    changed[LOWER] = _lowered(mtp, dict.fromkeys(norms, 1))
    changed[RAISE] = _lowered(mtp, dict.fromkeys(norms, -1))
    changed |= {f"{name} - 1": _lowered(mtp, {name: 1}) for name in norms}
    return {name: {**mtp, **part} for name, part in changed.items()}


def _lowered(tensors: Tensors, shifts: Mapping[str, int]) -> dict[str, Weight]:
    return {name: whole(tensors, name).float() - shift for name, shift in shifts.items()}


def _shifted(drafts: Seq[Tensor], readings: Seq[Reading], right: Tensor) -> list[Control]:
    """The same drafts, were they meant for another position."""
    early = torch.cat([draft == read.choices[:-1] for draft, read in zip(drafts, readings, strict=True)])
    late = [F.pad(draft[:-1] == read.choices[2:], (0, 1)) for draft, read in zip(drafts, readings, strict=True)]
    return [_control(EARLY, right, early), _control(LATE, right, torch.cat(late))]


def _control(name: str, wired: Tensor, other: Tensor) -> Control:
    gained, lost = int((other & ~wired).sum()), int((wired & ~other).sum())
    return Control(name, Share(int(other.sum()), len(other)), gained, lost)
