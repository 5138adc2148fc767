"""Which drafter a name stands for, and which tokens it may draft."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Literal, get_args

import torch

from surefoot.cache.recurrent import MAX_WINDOW
from surefoot.drafters.auto import DEEPEST, AutoDrafter
from surefoot.drafters.combined import CombinedDrafter
from surefoot.drafters.mtp import MTPDrafter, check_confidence
from surefoot.drafters.ngram import NgramDrafter
from surefoot.drafters.none import NoDrafter
from surefoot.drafters.suffix import SuffixDrafter
from surefoot.drafters.vocabulary import check_vocabulary, ranked
from surefoot.engine.profile import Profile
from surefoot.errors import CheckpointError, InputError, shown
from surefoot.kernels.rows import rows_of_a_pass
from surefoot.loading.files import is_there, read_list
from surefoot.model import DraftHead, MTPHead
from surefoot.sampling import require_int
from surefoot.types import Drafter

DrafterName = Literal["none", "ngram", "suffix", "mtp", "mtp+ngram", "mtp+suffix", "draft-model", "auto"]
NAMES = get_args(DrafterName)
NEED_HEAD = ("mtp", "mtp+ngram", "mtp+suffix")
COUNTED = "draft_vocab.json"  # of a checkpoint: token ids, the most frequent first
DRAFT_LENGTH = 3
DraftVocab = int | str | Path | Seq[int]
DRAFTER_PARTS = ("name", "propose", "observe", "release")


def check_drafter(drafter: str | Drafter, names: Seq[str] = NAMES) -> str:
    """The drafter's name. Raises InputError for a name that is not one of `names`, and for what is no Drafter."""
    known = drafter in names if isinstance(drafter, str) else has_all(drafter, DRAFTER_PARTS)
    if not known:
        expected = f"one of {', '.join(names)} or a Drafter" if names else "a Drafter"
        raise InputError(f"drafter: expected {expected}, found {shown(drafter)}")
    return drafter if isinstance(drafter, str) else drafter.name


def has_all(value: object, parts: Seq[str]) -> bool:
    """Whether an object (not its class) has the attributes of a Protocol."""
    return not isinstance(value, type) and all(hasattr(value, part) for part in parts)


def check_draft_length(drafter: str, draft_length: int, device: torch.device) -> None:
    """Raise InputError for a draft length that the drafter of this name cannot use on the device."""
    low, high = (0 if drafter == "none" else 1), (rows_of_a_pass(device) or MAX_WINDOW) - 1
    if isinstance(draft_length, bool) or not isinstance(draft_length, int) or not low <= draft_length <= high:
        plain = " (drafter='none' decodes plainly)" if low else ""
        raise InputError(f"draft_length: expected an integer from {low} to {high}{plain}, found {shown(draft_length)}")


def usual_draft_length(drafter: str, wanted: int | None, device: torch.device) -> int:
    """`wanted`, or how many tokens the drafter of this name drafts where nobody said: 3, but "auto", which may draft
    fewer at any step, chooses among more. Raises InputError for a number that it cannot use."""
    if wanted is None:
        wanted = DEEPEST if drafter == AutoDrafter.name else DRAFT_LENGTH
    check_draft_length(drafter, wanted, device)
    return wanted


def check_takes_vocabulary(drafter: str | Drafter) -> None:
    """Raise InputError for a drafter that a draft vocabulary does not concern."""
    if not isinstance(drafter, str) or drafter not in (*NEED_HEAD, "auto"):
        raise InputError(f"draft_vocab: expected with an MTP head's drafter ({', '.join(NEED_HEAD)}), "
                         f"found drafter={shown(drafter)}")  # fmt: skip


def check_takes_confidence(drafter: str | Drafter, min_confidence: float) -> None:
    """Raise InputError for a `min_confidence` that is none, and for one above 0 with a drafter that it does not
    concern. (The MTP head's own drafters: "auto" chooses lengths by another rule.)"""
    check_confidence(min_confidence)
    if min_confidence and (not isinstance(drafter, str) or drafter not in NEED_HEAD):
        raise InputError(f"min_confidence: expected with one of {', '.join(NEED_HEAD)}, found drafter={shown(drafter)}")


def draft_vocabulary(
    wanted: DraftVocab, vocab_size: int, eos_token_ids: Seq[int], folder: Path | None
) -> tuple[tuple[int, ...], list[str]]:
    """The ids that drafts are chosen among, ascending, and what the user should know of them.

    `wanted`: that many tokens, the most frequent ones by the list in the checkpoint's `folder` or, without one, the
    lowest ids; or a file with a JSON list of ids; or the ids. The end ids are added. Raises InputError, or
    CheckpointError for a list in the folder that is none.
    """
    notes: list[str] = []
    if isinstance(wanted, (str, Path)):
        try:
            ids = check_vocabulary(f"draft_vocab: {wanted}: ids", read_list(Path(wanted)), vocab_size)
        except CheckpointError as error:
            raise InputError(f"draft_vocab: {error}") from error
    elif isinstance(wanted, int):
        require_int("draft_vocab", wanted, low=1, high=vocab_size)
        file = None if folder is None else folder / COUNTED
        if file is not None and is_there(file):
            try:
                counted = check_vocabulary(f"{file}: ids", read_list(file), vocab_size)
            except InputError as error:
                raise CheckpointError(str(error)) from error
            notes.append(f"draft vocabulary: the first {wanted} of {COUNTED}")
        else:
            counted = []
            notes.append(f"draft vocabulary: ids 0 to {wanted - 1}, as the model has no {COUNTED}; "
                         "ids of a BPE tokenizer come roughly by frequency")  # fmt: skip
        ids = ranked(counted, vocab_size)[:wanted]
    else:
        ids = check_vocabulary("draft_vocab", wanted, vocab_size)
    return tuple(sorted({*ids, *(token for token in eos_token_ids if token < vocab_size)})), notes


def build_drafter(
    name: str,
    head: MTPHead | None,
    slots: int,
    draft_head: DraftHead | None = None,
    min_confidence: float = 0.0,
    profile: Callable[[], Profile] | None = None,
) -> Drafter:
    """The drafter that `name` stands for; "auto" goes by the `profile`, which is asked for if it is needed. The MTP
    head's chains end by `min_confidence` (`MTPDrafter`), but not those of "auto"."""
    if name in NEED_HEAD and head is None:
        raise CheckpointError(f"drafter {name!r}: expected a checkpoint with an MTP head (mtp.* tensors), found none")
    if name == "none":
        return NoDrafter()
    if name == "ngram":
        return NgramDrafter()
    if name == "suffix":
        return SuffixDrafter()
    least = min_confidence if name in NEED_HEAD else 0.0
    mtp = None if head is None else MTPDrafter(head, slots, least, draft_head)
    if name == "auto":
        assert profile is not None
        known = profile()
        return AutoDrafter(known.costs, NgramDrafter(), mtp or NoDrafter(), known.priors)
    assert mtp is not None
    if name == "mtp":
        return mtp
    return CombinedDrafter(NgramDrafter(), mtp) if name == "mtp+ngram" else CombinedDrafter(SuffixDrafter(), mtp)
