"""One run: load, check, count, time, compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Protocol

import torch

from surefoot.bench.cost import Ceiling, reader, step_bytes
from surefoot.bench.library import Library, require_transformers
from surefoot.bench.lossless import Verdict, check_outputs, check_windows
from surefoot.bench.machine import Watch, device_name, versions
from surefoot.bench.measure import (
    LIBRARY,
    Prompts,
    Row,
    Sample,
    decode,
    decode_library,
    make_row,
    measure,
)
from surefoot.bench.passes import EagerPasses, Passes
from surefoot.bench.prompts import random_prompts, text_prompts
from surefoot.bench.report import Report
from surefoot.bench.settings import PLAIN, Method, Settings
from surefoot.bench.synthetic import Continuations, SyntheticDrafter, SyntheticStep
from surefoot.bench.turns import Spread, take_turns
from surefoot.engine.drafting import NEED_HEAD
from surefoot.engine.engine import Engine, parse_device, parse_dtype
from surefoot.engine.loaded import LoadedModel
from surefoot.engine.runner import RunsItself
from surefoot.errors import InputError
from surefoot.loading.checkpoint import find_model
from surefoot.loading.shapes import SHAPES
from surefoot.model import DraftHead
from surefoot.model.tensors import random_tensors
from surefoot.sampling import SamplingParams
from surefoot.types import Drafter, Target


class Advance(Protocol):
    """Progress of a stage."""

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` units are ready."""


Stage = Callable[[str], AbstractContextManager[Advance]]


def no_stage(label: str) -> AbstractContextManager[Advance]:
    """Shows nothing."""
    return nullcontext(lambda done, total: None)


def run(settings: Settings, stage: Stage = no_stage) -> Report:
    """Do all of it. Raises InputError for what was asked, CheckpointError for the files, NotLosslessError:
    then nothing has been timed."""
    if settings.against is not None:
        require_transformers()
    watch = Watch()
    with torch.inference_mode():
        bench = Bench.load(settings, stage)
        verdict = bench.check(stage)
        bandwidth, passes = bench.time_passes(stage)
        rows, equal = bench.speeds(bench.library(), stage)
    config, device = bench.model.config, bench.model.decoder.device
    kv_dtype = torch.float32 if device.type == "cpu" else None  # as the caches are
    weights = torch.float8_e4m3fn if settings.weights == "fp8" else bench.model.decoder.dtype
    if weights != bench.model.decoder.dtype:
        kv_dtype = bench.model.decoder.dtype
    draft_vocab = None if bench.draft_head is None else len(bench.draft_head.ids)
    step = step_bytes(config, settings.context, settings.batch, weights, kv_dtype=kv_dtype, draft_vocab=draft_vocab)
    return Report(
        model=settings.label,
        random_weights=settings.shape is not None,
        lossless=verdict,
        config=settings.resolved(list(bench.methods.values())),
        sizes=asdict(config),
        device=device_name(device),
        machine=watch.machine(settings.command, versions()),
        step_bytes=step,
        ceiling=Ceiling.of(step, bandwidth, settings.batch),
        passes=passes,
        rows=rows,
        library_equal=equal,
        notes=[*dict.fromkeys(note for engine in bench.engines.values() for note in engine.notes), *settings.notes],
    )


@dataclass
class Bench:
    """A loaded model, the ways to decode with it, and the prompts, all checked. `texts` is what plain decoding gave."""

    settings: Settings
    model: LoadedModel
    draft_head: DraftHead | None
    methods: dict[str, Method]
    engines: dict[str, Engine]
    texts: Continuations
    prompts: Prompts
    params: SamplingParams

    @classmethod
    def load(cls, settings: Settings, stage: Stage) -> Bench:
        """Weights into memory, an engine for every method."""
        with stage("loading") as bar:
            model = load_model(settings, bar)
        if settings.max_len > model.config.max_positions:
            raise InputError(f"context: expected at most {model.config.max_positions} positions with the tokens behind "
                             f"it, as the model has, found {settings.max_len}")  # fmt: skip
        draft_head, _ = model.draft_head(settings.draft_vocab)  # which complains of a model without an MTP head
        methods = {method.name: method for method in settings.methods(model.head is not None)}
        texts = Continuations()
        engines = make_engines(settings, model, methods, texts)
        params = SamplingParams(max_new_tokens=settings.tokens, ignore_eos=True)
        return cls(settings, model, draft_head, methods, engines, texts, make_prompts(settings, model), params)

    def check(self, stage: Stage) -> Verdict:
        """Decode every prompt by every method, and compare; compare windows with single steps. Warms up, too."""
        outputs = {}
        with stage("checking that no token changes") as bar:
            for done, (name, engine) in enumerate(self.engines.items()):
                bar(done, len(self.engines))
                outputs[name] = decode(engine, self.prompts, self.params).outputs
                if name == PLAIN:
                    self.texts.learn([prompt for batch in self.prompts for prompt in batch], outputs[name])
        check_outputs(outputs)
        with self._passes() as passes:
            sizes = [size for size in passes.sizes if size > 1]
            positions = check_windows(passes, sizes)
        s = self.settings
        return Verdict(True, list(outputs), s.prompts * s.batch, s.batch, s.tokens, sizes, positions)

    def time_passes(self, stage: Stage) -> tuple[float, dict[str, Spread]]:
        """The device's read bandwidth in bytes/s, and milliseconds of single passes."""
        read, size = reader(self.model.decoder.device)
        with stage("timing passes"), self._passes() as passes:
            passes.start()
            actions = passes.actions() | {"read": read}
            times = take_turns(actions, self.settings.rounds, passes.rewind, passes.wait, passes.calls)
        return 1000 * size / times.pop("read").median, times

    def library(self) -> Library | None:
        """The same weights in `transformers`, if they were asked for."""
        s, device = self.settings, str(self.model.decoder.device)
        if s.against is None:
            return None
        dtype = parse_dtype(s.dtype)
        if s.shape is not None:
            tensors = random_tensors(self.model.config, s.seed, device, dtype)
            return Library.from_tensors(self.model.config, tensors, dtype, device)
        assert s.model is not None
        return Library.from_folder(find_model(s.model), self.model.config.moe is not None, dtype, device)

    def speeds(self, library: Library | None, stage: Stage) -> tuple[list[Row], int | None]:
        """A row for every method; for how many prompts `transformers` gave the same tokens."""
        actions: dict[str, Callable[[], Sample]] = {}
        if library is not None:
            actions[LIBRARY] = partial(decode_library, library, self.prompts, self.settings.tokens)
            actions[LIBRARY]()  # warms up
        for name, engine in self.engines.items():
            actions[name] = partial(decode, engine, self.prompts, self.params)
        done, total = 0, len(actions) * self.settings.rounds
        with stage("measuring") as bar:

            def turn() -> None:
                nonlocal done
                done += 1
                bar(done, total)

            samples = measure(actions, self.settings.rounds, free=[LIBRARY], turn=turn)
        synthetic = [name for name, method in self.methods.items() if self.settings.sets_acceptance(method)]
        rows = [make_row(name, self.methods.get(name), samples, name in synthetic) for name in actions]
        if library is None:
            return rows, None
        pairs = zip(samples[PLAIN][0].outputs, samples[LIBRARY][0].outputs, strict=True)
        return rows, sum(ours == theirs for ours, theirs in pairs)

    @contextmanager
    def _passes(self) -> Iterator[Passes]:
        """The fused model's where it runs, else those of the engine's own target."""
        model, s = self.model, self.settings
        if model.fits_kernels():
            from surefoot.bench.fused import FusedPasses

            yield FusedPasses(model.fused(s.batch), s.context, self.draft_head)
            return
        passes = EagerPasses(model.target(s.batch), model.head, s.context, draft_head=self.draft_head)
        yield passes
        passes.close()


def load_model(settings: Settings, progress: Advance) -> LoadedModel:
    """The checkpoint, or random weights of the shape."""
    device, dtype = parse_device(settings.device), parse_dtype(settings.dtype)
    if settings.shape is not None:
        config = SHAPES[settings.shape]
        tensors = random_tensors(config, settings.seed, device, dtype)
        return LoadedModel.from_tensors(config, tensors, settings.max_len, narrow=settings.weights == "fp8")
    assert settings.model is not None
    needs_head = any(name in NEED_HEAD for name in settings.drafters)
    return LoadedModel.from_checkpoint(settings.model, device=device, dtype=dtype, max_len=settings.max_len,
                                       mtp="require" if needs_head else "if-present", progress=progress)  # fmt: skip


def make_engines(
    settings: Settings, model: LoadedModel, methods: Mapping[str, Method], texts: Continuations
) -> dict[str, Engine]:
    """An engine for every method; where acceptance is set, one that overwrites drafts with what `texts` will know."""
    slots, shares = settings.batch, settings.synthetic_acceptance
    step = SyntheticStep(model.fused(slots), shares, texts) if shares and model.fits_kernels() else None
    engines = {}
    for name, method in methods.items():
        vocabulary = settings.draft_vocab if method.drafter in NEED_HEAD else None
        if not settings.sets_acceptance(method):
            engines[name] = Engine.over(
                model, drafter=method.drafter, draft_length=method.depth, slots=slots, draft_vocab=vocabulary
            )
            continue
        draft_head, notes = model.draft_head(vocabulary)
        target: Target | RunsItself | None = model.device_target(
            method.drafter, method.depth, slots, draft_head, overwrite=step
        )
        if isinstance(target, RunsItself):
            drafter: Drafter = target.drafter
        else:
            target, inner = model.target(slots), model.drafter(method.drafter, slots, draft_head)
            drafter = SyntheticDrafter(inner, shares, texts, model.config.vocab_size)
        engines[name] = Engine(target, drafter, method.depth, notes=[*model.notes, *notes])
    return engines


def make_prompts(settings: Settings, model: LoadedModel) -> Prompts:
    """Batches of texts of `context` tokens."""
    count = settings.prompts * settings.batch
    if model.tokenizer is None:
        flat = random_prompts(model.config.vocab_size, count, settings.context)
    else:
        flat = text_prompts(model.tokenizer, count, settings.context)
    return [flat[i : i + settings.batch] for i in range(0, count, settings.batch)]
