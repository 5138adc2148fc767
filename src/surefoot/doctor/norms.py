"""Norm weights: in which convention a file has them, and which of them were shifted once too often or not at all.

Hugging Face files of this family have all norm weights but the DeltaNet's zero-centred: the scale is 1 + w. MLX and
GGUF files have the scale itself. Loading decides by the file's format. A converter that forgets, or does it again,
leaves means that are off by one. That alone proves nothing (a healthy `mtp.norm` can have a mean of 2.6), so what is
found here are suspects; the probe tries them corrected.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from safetensors import SafetensorError

from surefoot.errors import CheckpointError
from surefoot.loading.files import Stored, open_safetensors
from surefoot.loading.names import Place, is_mtp

PLAIN = "linear_attn.norm.weight"
CENTRED = ("layernorm.weight", "q_norm.weight", "k_norm.weight", ".pre_fc_norm_embedding.weight",
           ".pre_fc_norm_hidden.weight")  # fmt: skip
FINAL = ("model.norm.weight", "mtp.norm.weight")
LAYER = re.compile(r"^model\.layers\.\d+\.")

HIGH = 0.5  # median mean of zero-centred weights above which they look like scales
FEW = 0.02  # share of negative weights below which they do: scales are hardly ever negative
MANY = 0.25  # share of weights below -1, that is of negative scales, above which a shift is missing
NEAR = 0.4  # how far from 1 the difference between a norm's mean and its siblings' may be to be suspected
SIBLINGS = 3


@dataclass(frozen=True)
class Norm:
    """A stored norm weight: its mean, and the shares of its numbers below 0 and below -1."""

    name: str
    mean: float
    negative: float
    below: float


@dataclass(frozen=True)
class Suspect:
    """Weights whose stored numbers seem to be `shift` too high (1: shifted once too often; -1: once too little)."""

    names: tuple[str, ...]
    shift: int
    reason: str


def is_centred(name: str) -> bool:
    """Whether a canonical tensor is a norm weight that Hugging Face files store zero-centred."""
    return name.endswith(CENTRED) or name in FINAL


def read_norms(found: Mapping[str, Mapping[Place, Stored]]) -> list[Norm]:
    """Of all norm weights that can be read, in the order of their names."""
    norms = []
    for name in sorted(found):
        if not (is_centred(name) or name.endswith(PLAIN)):
            continue
        for stored in found[name].values():
            try:
                with open_safetensors(stored.file) as reader:
                    values = reader.get_tensor(stored.name).float()
            except (CheckpointError, SafetensorError, OSError):
                continue  # the file has been reported
            if values.numel():
                below = (values < 0).float().mean().item(), (values < -1).float().mean().item()
                norms.append(Norm(name, values.mean().item(), *below))
    return norms


def medians(norms: Iterable[Norm]) -> dict[str, float]:
    """The median mean of each kind of norm that is there."""
    kinds: dict[str, list[float]] = {}
    for norm in norms:
        kinds.setdefault(_part(norm.name), []).append(norm.mean)
    return {kind: statistics.median(means) for kind, means in kinds.items()}


def suspects(norms: Seq[Norm]) -> list[Suspect]:
    """What seems to be shifted: all of the decoder's norms, all of the MTP head's, all of the DeltaNet's, else single
    ones that differ by about 1 from those of the other layers."""
    decoder = [norm for norm in norms if is_centred(norm.name) and not is_mtp(norm.name)]
    head = [norm for norm in norms if is_mtp(norm.name)]
    plain = [norm for norm in norms if norm.name.endswith(PLAIN)]
    whole = [_as_a_group(group) for group in (decoder, head)]
    if plain and (median := statistics.median(norm.mean for norm in plain)) > 1 + HIGH:
        reason = f"the DeltaNet's norms have means about {median:.2f}; plain scales are near 1"
        whole.append(Suspect(tuple(norm.name for norm in plain), 1, reason))
    found = [suspect for suspect in whole if suspect is not None]
    taken = {name for suspect in found for name in suspect.names}
    return found + [one for one in _outliers(norms) if not taken & set(one.names)]


def _as_a_group(norms: Seq[Norm]) -> Suspect | None:
    """Judged by the norms inside; a final norm's mean may be anything."""
    inner = [norm for norm in norms if norm.name not in FINAL]
    if not inner:
        return None
    names = tuple(norm.name for norm in norms)
    median = statistics.median(norm.mean for norm in inner)
    negative = statistics.fmean(norm.negative for norm in inner)
    below = statistics.fmean(norm.below for norm in inner)
    told = f"the median of their means is {median:.2f}, {negative:.0%} of the numbers are negative"
    if median > HIGH and negative < FEW:
        return Suspect(names, 1, f"{told}; zero-centred ones are near 0 and of both signs")
    if below > MANY:
        return Suspect(names, -1, f"{told}, {below:.0%} are below -1, which makes negative scales")
    return None


def _outliers(norms: Iterable[Norm]) -> list[Suspect]:
    kinds: dict[str, list[Norm]] = {}
    for norm in norms:
        if LAYER.match(norm.name):
            kinds.setdefault(_kind(norm, norms), []).append(norm)
    found = []
    for group in kinds.values():
        if len(group) < SIBLINGS:
            continue
        middle = statistics.median(norm.mean for norm in group)
        for norm in group:
            off = norm.mean - middle
            if norm.name.endswith(PLAIN) and off < 0:
                continue  # a first layer's may well be small
            if abs(abs(off) - 1) < NEAR:
                reason = f"its mean is {norm.mean:.2f}, that of its kind in other layers {middle:.2f}"
                found.append(Suspect((norm.name,), 1 if off > 0 else -1, reason))
    return found


def _kind(norm: Norm, norms: Iterable[Norm]) -> str:
    """Norms of one name differ between layers with attention and without."""
    match = LAYER.match(norm.name)
    assert match is not None
    attention = any(other.name == f"{match[0]}self_attn.q_norm.weight" for other in norms)
    return f"{norm.name[match.end() :]} {attention}"


def _part(name: str) -> str:
    if is_mtp(name):
        return "mtp"
    if name.endswith(PLAIN):
        return "deltanet"
    if name in FINAL:
        return "final"
    return "layers" if name.endswith("layernorm.weight") else "query and key"
