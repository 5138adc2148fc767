"""Which drafter a name stands for."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Literal, get_args

import torch

from surefoot.cache.recurrent import MAX_WINDOW
from surefoot.drafters.combined import CombinedDrafter
from surefoot.drafters.mtp import MTPDrafter
from surefoot.drafters.ngram import NgramDrafter
from surefoot.drafters.none import NoDrafter
from surefoot.errors import CheckpointError, InputError, shown
from surefoot.kernels.rows import rows_of_a_pass
from surefoot.model import MTPHead
from surefoot.types import Drafter

DrafterName = Literal["none", "ngram", "mtp", "mtp+ngram", "draft-model", "auto"]
NAMES = get_args(DrafterName)
NEED_HEAD = ("mtp", "mtp+ngram")
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


def build_drafter(name: str, head: MTPHead | None, slots: int) -> Drafter:
    """The drafter that `name` stands for; "auto" is MTP where there is a head and n-gram lookup elsewhere."""
    if name == "auto":
        name = "ngram" if head is None else "mtp"
    if name in NEED_HEAD and head is None:
        raise CheckpointError(f"drafter {name!r}: expected a checkpoint with an MTP head (mtp.* tensors), found none")
    if name == "none":
        return NoDrafter()
    if name == "ngram":
        return NgramDrafter()
    assert head is not None
    mtp = MTPDrafter(head, slots)
    return mtp if name == "mtp" else CombinedDrafter(NgramDrafter(), mtp)
