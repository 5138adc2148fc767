"""All of it: a folder to a report."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from surefoot.bench.cost import elements
from surefoot.config import ModelConfig
from surefoot.doctor import checks, verdicts
from surefoot.doctor.checks import MtpState, StoredType, Vocabulary
from surefoot.doctor.findings import SEVERITIES, Finding
from surefoot.doctor.norms import Suspect, medians, read_norms, suspects
from surefoot.doctor.probe import Probe, built_in, cut, probe
from surefoot.doctor.speed import Speed, bandwidth_of, speed_of
from surefoot.doctor.survey import Survey, model_type, take
from surefoot.errors import InputError, SurefootError
from surefoot.loading.checkpoint import EIGHT_BITS, EMBEDDING
from surefoot.loading.files import MLX
from surefoot.loading.tokenizer import Tokenizer
from surefoot.model.tensors import target_shapes
from surefoot.sampling import require_int

Stage = Callable[[str], None]

UNUSABLE = ("mtp-wrong", "mtp-extra", "mtp-layers")  # findings about a whole head that does not load


@dataclass(frozen=True)
class Settings:
    """`text` to probe with (None: built-in held-out texts), cut to `tokens` tokens; `depth`: draft positions. Raises
    InputError."""

    probe: bool = True
    text: str | None = None
    tokens: int = 1024
    depth: int = 4
    bandwidth: bool = True

    def __post_init__(self) -> None:
        require_int("depth", self.depth, low=1, high=16)
        require_int("tokens", self.tokens, low=32)


@dataclass(frozen=True)
class Parameters:
    """Of the text model by its config: all, of these embedding and head, those that a token uses (fewer in a mixture of
    experts), and the MTP head's in the files."""

    total: int
    embeddings: int
    active: int
    mtp: int


@dataclass(frozen=True)
class Norms:
    """`convention` by the files' format; `medians`: of the stored means, by kind."""

    convention: str
    medians: dict[str, float]


@dataclass(frozen=True)
class Report:
    """What was found. None where the files do not let it be known."""

    model: str
    architecture: str | None
    config: ModelConfig | None
    parameters: Parameters | None
    files: list[str]
    stored: dict[str, StoredType]
    quantisation: str | None
    vocabulary: Vocabulary | None
    end_ids: dict[str, list[int]]
    chat_template: bool
    mtp: MtpState
    norms: Norms
    speed: Speed | None
    probe: Probe | None
    findings: list[Finding]

    @property
    def sound(self) -> bool:
        """Whether there is no error; warnings may be there."""
        return not any(finding.severity == "error" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Plain data, sums and shares with it."""
        out = asdict(self) | {"sound": self.sound}
        if self.speed is not None:
            out["speed"]["step"]["total"] = self.speed.step.total
            out["speed"]["slot"]["total"] = self.speed.slot.total
        if self.probe is not None:
            out["probe"]["loss"] = _number(self.probe.loss)
            out["probe"]["acceptance"] = [share.rate for share in self.probe.acceptance]
            out["probe"]["drafts"] = [share.of for share in self.probe.acceptance]
            out["probe"]["controls"] = {control.name: control.share.rate for control in self.probe.controls}
            out["probe"]["trials"] = [
                {"names": trial.suspect.names, "shift": trial.suspect.shift, "stored": _number(trial.stored),
                 "corrected": _number(trial.corrected), "confirmed": trial.confirmed}
                for trial in self.probe.trials
            ]  # fmt: skip
        return out


def examine(
    folder: Path,
    settings: Settings,
    device: torch.device,
    dtype: torch.dtype,
    stage: Stage = lambda _: None,
    name: str | None = None,
) -> Report:
    """Files and headers, then what their sizes mean on this machine, then the probe. What is wrong with the checkpoint
    is in the findings; `stage` is told what takes time, `name` is the checkpoint's in the report. Raises InputError for
    a text without enough tokens."""
    survey = take(folder)
    checks.check_tensors(survey)
    head = checks.check_mtp(survey)
    quantisation = checks.check_quantisation(survey)
    tokenizer = checks.read_tokenizer(survey)
    vocabulary = checks.check_vocabulary(survey, tokenizer)
    ends = checks.read_ends(survey, tokenizer)
    template = checks.check_chat(survey, tokenizer, checks.check_ends(survey, ends, vocabulary))
    norms = read_norms(survey.found)
    suspected = suspects(norms) if survey.layout != MLX else []
    speed = _speed(survey, head, settings, device, dtype, stage)
    probed = _probe(survey, head, tokenizer, suspected, settings, device, dtype, stage)
    if probed is None:
        survey.findings += verdicts.unprobed(suspected)
    else:
        survey.findings += verdicts.of_decoder(probed)
        survey.findings += (
            verdicts.of_head(probed, suspected) if probed.acceptance else verdicts.unprobed(_of_head(suspected))
        )
    survey.findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    kind = model_type(survey.raw)
    convention = "shifted (the scale itself)" if survey.layout == MLX else "zero-centred (the scale is 1 + w)"
    return Report(
        name or str(folder), kind if isinstance(kind, str) else None, survey.config, _parameters(survey, head),
        sorted({stored.file.name for stored in survey.tensors}), checks.stored_types(survey.tensors), quantisation,
        vocabulary, ends, template, head, Norms(convention, medians(norms)), speed, probed, survey.findings,
    )  # fmt: skip


def _number(value: float) -> float | None:
    """JSON has no others than finite ones."""
    return value if math.isfinite(value) else None


def _of_head(suspected: Seq[Suspect]) -> list[Suspect]:
    return [one for one in suspected if any(name.startswith("mtp.") for name in one.names)]


def _parameters(survey: Survey, head: MtpState) -> Parameters | None:
    config = survey.config
    if config is None:
        return None
    shapes = target_shapes(config)
    tables = {name: shape for name, shape in shapes.items() if name in (EMBEDDING, "lm_head.weight")}
    total = elements(shapes, replace(config, moe=None), 1)
    return Parameters(total, elements(tables, config, 1), elements(shapes, config, 1), head.parameters)


def _speed(
    survey: Survey, head: MtpState, settings: Settings, device: torch.device, dtype: torch.dtype, stage: Stage
) -> Speed | None:
    if survey.config is None:
        return None
    config = replace(survey.config, mtp_layers=0 if head.state == "absent" else 1)
    bandwidth = None
    if settings.bandwidth:
        stage("measuring the read bandwidth")
        try:
            bandwidth = bandwidth_of(device)
        except InputError as error:
            survey.note("bandwidth-unmeasured", str(error))
    narrow = any(stored.dtype == EIGHT_BITS for stored in survey.tensors)
    try:
        return speed_of(config, dtype, device, narrow, bandwidth)
    except (RuntimeError, OverflowError) as error:
        survey.note("sizes-impossible", f"no memory has room for what config.json describes: {error}")
        return None


def _probe(
    survey: Survey, head: MtpState, tokenizer: Tokenizer | None, suspected: Seq[Suspect], settings: Settings,
    device: torch.device, dtype: torch.dtype, stage: Stage,
) -> Probe | None:  # fmt: skip
    """None, and a note that says why, where there is nothing to run."""
    if not settings.probe:
        return None
    errors = [f.code for f in survey.findings if f.severity == "error" and not f.code.startswith("mtp-")]
    reason = None
    if survey.config is None or errors:
        reason = f"the model does not load ({', '.join(errors)})"
    elif tokenizer is None:
        reason = "there is no tokenizer to read a text with"
    if reason is not None:
        survey.note("probe-skipped", f"nothing was run: {reason}")
        return None
    assert tokenizer is not None
    if settings.text is None:
        windows = built_in(tokenizer, settings.tokens)
    else:
        windows = cut([tokenizer.encode(settings.text)], settings.tokens)
    usable = head.state == "present" and not any(finding.code in UNUSABLE for finding in survey.findings)
    assert survey.config is not None
    stage("probing: the target and its head read a text")
    size = min(tokenizer.vocab_size or survey.config.vocab_size, survey.config.vocab_size)
    try:
        return probe(survey.folder, windows, suspected, with_head=usable, depth=settings.depth,
                     device=device, dtype=dtype, size=size)  # fmt: skip
    except InputError as error:
        if str(error).startswith("text:"):
            raise
        survey.warning(
            "probe-failed",
            f"the weights were not tried: {error}",
            "Use a smaller --dtype, a --device with more memory, or --no-probe.",
        )
    except SurefootError as error:
        survey.error(
            "load-failed",
            str(error),
            "Engine.from_pretrained fails in the same way; see docs/checkpoints.md.",
        )
    return None
