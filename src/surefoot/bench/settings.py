"""What a benchmark run was asked for, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from surefoot.engine.arguments import check_weights, parse_device, parse_dtype
from surefoot.engine.drafting import NEED_HEAD, check_draft_length
from surefoot.errors import InputError, shown
from surefoot.loading.shapes import SHAPES
from surefoot.sampling import require_int

PLAIN = "plain"
LABELS = {"none": PLAIN, "ngram": "n-gram", "mtp": "MTP", "mtp+ngram": "MTP + n-gram"}
MTP_DEPTHS = (1, 2, 3, 4, 5, 6)
COPIED = 4  # draft tokens of drafters that copy, if nobody said how many
STEP_ROOM = 128  # positions behind the context that checking and timing single passes takes


@dataclass(frozen=True)
class Method:
    """One way to decode: a drafter and its draft length (0 without one)."""

    drafter: str
    depth: int

    @property
    def name(self) -> str:
        """As tables have it."""
        label = LABELS.get(self.drafter, self.drafter)
        return f"{label}, K = {self.depth}" if self.depth else label


@dataclass(frozen=True)
class Settings:
    """Options of a run. One of `model` (a name, folder or hub id) and `shape` (random weights) is set. `prompts` is the
    number of batches of `batch` texts, each of `context` tokens, that are continued by `tokens` (None: 3, or 1 with
    random weights); all are checked, and measured in `rounds` rounds, of fewer if a drafter's would take more than
    `seconds`. Empty `drafters` are all that the model has parts for, those with its head draft among the tokens of
    `draft_vocab` (`Engine.from_pretrained`); empty `depths` are 1 to 6 for the MTP head and 4 for drafters that copy.
    Raises InputError."""

    model: str | None = None
    shape: str | None = None
    device: str = "cpu"
    dtype: str = "bfloat16"
    weights: str = "whole"
    context: int = 1024
    batch: int = 1
    prompts: int | None = None
    drafters: tuple[str, ...] = ()
    depths: tuple[int, ...] = ()
    draft_vocab: int | str | None = None
    synthetic_acceptance: tuple[float, ...] = ()
    tokens: int = 128
    rounds: int = 3
    seconds: float = 20.0
    against: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.model is None) == (self.shape is None):
            raise InputError(f"model: expected a model or a shape, found {shown(self.model)} and {shown(self.shape)}")
        _one_of("shape", self.shape, SHAPES)
        _one_of("against", self.against, ("transformers",))
        parse_dtype(self.dtype)
        device = parse_device(self.device)
        check_weights(self.weights, device)
        for name, value in (("context", self.context), ("batch", self.batch), ("rounds", self.rounds),
                             ("prompts", self.batches)):  # fmt: skip
            require_int(name, value, low=1)
        if not self.seconds > 0:
            raise InputError(f"seconds: expected more than 0, found {self.seconds}")
        require_int("tokens", self.tokens, low=2)  # against transformers one of them is taken off
        require_int("seed", self.seed, low=0)
        for drafter in self.drafters:
            _one_of("drafters", drafter, LABELS)
        for depth in self.depths:
            check_draft_length("mtp", depth, device)
        if self.draft_vocab is not None and self.drafters and not set(self.drafters) & set(NEED_HEAD):
            raise InputError("draft_vocab: expected with an MTP head's drafter, found drafters "
                             f"{', '.join(self.drafters)}")  # fmt: skip
        self._check_acceptance()

    @property
    def max_len(self) -> int:
        """Positions that the run needs."""
        return self.context + max(self.tokens, STEP_ROOM)

    @property
    def batches(self) -> int:
        """How many batches of prompts there are."""
        return (1 if self.shape is not None else 3) if self.prompts is None else self.prompts

    @property
    def label(self) -> str:
        """The model's name; of a folder only the last part, which says nothing of the machine."""
        if self.shape is not None:
            return self.shape
        assert self.model is not None
        return Path(self.model).name if Path(self.model).exists() else self.model

    @property
    def without_paths(self) -> dict[str, Any]:
        """What stands for options that may hold a path of this machine."""
        vocabulary = Path(self.draft_vocab).name if isinstance(self.draft_vocab, str) else self.draft_vocab
        return {"model": self.label if self.shape is None else None, "draft_vocab": vocabulary}

    @property
    def command(self) -> str:
        """The command line of these settings."""
        words = ["surefoot", "bench"]
        for field in fields(self):
            value = self.without_paths.get(field.name, getattr(self, field.name))
            if value != field.default:
                listed = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                words += ["--" + field.name.replace("_", "-"), listed]
        return " ".join(words)

    def methods(self, with_head: bool) -> list[Method]:
        """What is measured, plain decoding first. Drafters that were asked for are there in any case. Raises InputError
        for a set acceptance without a head's drafter."""
        usable = [name for name in LABELS if with_head or name not in NEED_HEAD]
        chosen = [name for name in self.drafters or usable if name != "none"]
        if self.synthetic_acceptance and not set(chosen) & set(NEED_HEAD):
            raise InputError("synthetic_acceptance: expected with drafts of an MTP head "
                             f"({', '.join(NEED_HEAD)}), found drafters {', '.join(chosen) or 'none'}")  # fmt: skip
        return [Method("none", 0), *(Method(name, depth) for name in chosen for depth in self._depths_of(name))]

    def sets_acceptance(self, method: Method) -> bool:
        """Whether the method's drafts are overwritten: a head's are, n-gram drafts mean something with any weights."""
        return bool(self.synthetic_acceptance) and method.drafter in NEED_HEAD

    @property
    def notes(self) -> list[str]:
        """Sentences that belong to the figures."""
        if not self.synthetic_acceptance:
            return []
        shares = " ".join(f"{share:g}" for share in self.synthetic_acceptance)
        said = [f"acceptance set to {shares}: the MTP head drafts, then its drafts are overwritten"]
        deeper = [depth for depth in self.depths or MTP_DEPTHS if depth > len(self.synthetic_acceptance)]
        if deeper:
            said.append(f"MTP at K = {', '.join(map(str, deeper))} left out: acceptance is set for "
                        f"{len(self.synthetic_acceptance)} positions")  # fmt: skip
        return said

    def _depths_of(self, drafter: str) -> list[int]:
        most = len(self.synthetic_acceptance) if drafter in NEED_HEAD else 0
        depths = self.depths or (MTP_DEPTHS if drafter == "mtp" else (min(COPIED, most or COPIED),))
        return [depth for depth in depths if depth <= (most or depth)]

    def _check_acceptance(self) -> None:
        shares = self.synthetic_acceptance
        if not all(0 <= share <= 1 for share in shares) or list(shares) != sorted(shares, reverse=True):
            raise InputError("synthetic_acceptance: expected shares from 0 to 1, none above the one before it, "
                             f"found {', '.join(map(str, shares))}")  # fmt: skip
        if shares and min(self.depths, default=0) > len(shares):
            raise InputError(f"synthetic_acceptance: expected a share for each position up to the least depth, "
                             f"{min(self.depths)}, found {len(shares)}")  # fmt: skip

    def resolved(self, methods: Seq[Method]) -> dict[str, Any]:
        """Every option as it was in force, without a path of this machine."""
        drafters = list(dict.fromkeys(method.drafter for method in methods))
        depths = sorted({method.depth for method in methods if method.depth})
        return {**vars(self), **self.without_paths, "drafters": drafters, "depths": depths, "prompts": self.batches,
                "max_len": self.max_len, "temperature": 0.0,
                "ignore_eos": True}  # fmt: skip


def _one_of(name: str, value: str | None, known: Any) -> None:
    if value is not None and value not in known:
        raise InputError(f"{name}: expected one of {', '.join(known)}, found {shown(value)}")
