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
from surefoot.loading.checkpoint import find_model, inspect
from surefoot.prove.caches import prove_caches
from surefoot.prove.identity import prove_identity
from surefoot.prove.law import prove_law
from surefoot.prove.parity import prove_parity
from surefoot.prove.reference import Reference
from surefoot.prove.report import Report, Section
from surefoot.prove.samples import prove_samples
from surefoot.prove.settings import Settings
from surefoot.prove.subject import LONGEST_PROMPT, Subject
from surefoot.prove.weights import stored_weights

SPARE = 64  # positions beside prompt and output
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
    folder = find_model(settings.model)
    config = inspect(folder).config
    settings.drafters_of(bool(config.mtp_layers))
    with ExitStack() as stack:
        read, source = stored_weights(folder, stack)
        model = LoadedModel.from_checkpoint(
            folder, device=device, dtype=dtype, max_len=LONGEST_PROMPT + settings.new_tokens + SPARE, mtp="if-present",
            progress=progress,
        )  # fmt: skip
        subject = Subject(settings, model, Reference(config, read))
        sections = []
        for done, part in enumerate(parts):
            progress(done, len(parts))
            start = time.perf_counter()
            section = PARTS[part](subject)
            section.seconds = time.perf_counter() - start
            sections.append(section)
    sections[-1].notes.append(source)
    shown = asdict(settings) | {
        "model": None, "prompts": len(subject.prompts), "drafters": list(subject.drafters),
        "max_k": settings.depths[-1], "tokens": settings.new_tokens, "samples": settings.sample_count,
    }  # fmt: skip
    name = Path(settings.model).name
    return Report(
        name, device_name(device), shown | {"model": name, "threads": torch.get_num_threads()}, versions(), sections,
        list(model.notes),
    )  # fmt: skip
