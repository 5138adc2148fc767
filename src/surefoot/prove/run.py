"""A proof, section by section."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch

from surefoot.bench.machine import versions
from surefoot.engine.arguments import parse_device, parse_dtype
from surefoot.engine.hardware import device_name
from surefoot.engine.loaded import LoadedModel
from surefoot.engine.prompts import Progress
from surefoot.loading.checkpoint import inspect
from surefoot.prove.caches import prove_caches
from surefoot.prove.identity import prove_identity
from surefoot.prove.law import prove_law
from surefoot.prove.parity import prove_parity
from surefoot.prove.reference import Reference
from surefoot.prove.report import Report, Section
from surefoot.prove.samples import prove_samples
from surefoot.prove.settings import Settings
from surefoot.prove.source import Source, find_source
from surefoot.prove.subject import LONGEST_PROMPT, SPARE, CheckpointSubject, Subject, drafters_of
from surefoot.prove.weights import stored_weights

PARTS: dict[str, Callable[[Subject], Section]] = {
    "identity": prove_identity,
    "law": lambda subject: prove_law(subject.settings),
    "samples": prove_samples,
    "caches": prove_caches,
    "parity": prove_parity,
}


def prove(settings: Settings, progress: Progress = lambda done, total: None, parts: Seq[str] = tuple(PARTS)) -> Report:
    """Load the model and put it to all five, or some `parts` of the proof. Raises InputError for what was asked,
    CheckpointError for the files; what fails later is in the report."""
    device, dtype = parse_device(settings.device), parse_dtype(settings.dtype)
    with ExitStack() as stack:
        subject = _subject(settings, device, dtype, progress, stack)
        sections = []
        for done, part in enumerate(parts):
            progress(done, len(parts))
            start = time.perf_counter()
            section = PARTS[part](subject)
            section.seconds = time.perf_counter() - start
            sections.append(section)
    shown = asdict(settings) | {
        "model": None, "prompts": len(subject.prompts), "drafters": list(subject.drafters),
        "max_k": settings.depths[-1], "tokens": settings.new_tokens, "samples": subject.samples,
    }  # fmt: skip
    name = Path(settings.model).name
    return Report(
        name, device_name(device), shown | {"model": name, "threads": torch.get_num_threads()}, versions(), sections,
        list(subject.notes),
    )  # fmt: skip


def _subject(
    settings: Settings, device: torch.device, dtype: torch.dtype, progress: Progress, stack: ExitStack
) -> Subject:
    """The model, run by the engine if it can. Files stay open as long as the `stack`."""
    found = find_source(settings.model)
    if isinstance(found, Source):
        from surefoot.prove.guest import GuestSubject  # needs transformers

        return GuestSubject(settings, found, device, dtype)
    config = inspect(found).config
    drafters_of(settings, bool(config.mtp_layers))
    read, source = stored_weights(found, stack)
    model = LoadedModel.from_checkpoint(
        found, device=device, dtype=dtype, max_len=LONGEST_PROMPT + settings.new_tokens + SPARE, mtp="if-present",
        progress=progress,
    )  # fmt: skip
    return CheckpointSubject(settings, model, Reference(config, read), source)
