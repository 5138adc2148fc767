"""A run: load once, and for every cell of context and batch check, count, time, compare."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Protocol

import torch

from surefoot.bench.cost import Ceiling, reader, step_bytes
from surefoot.bench.library import Library, require_transformers
from surefoot.bench.lossless import Outputs, Verdict, check_outputs, check_windows
from surefoot.bench.machine import Watch, versions
from surefoot.bench.measure import (
    LIBRARY,
    Batch,
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
from surefoot.bench.report import Report, StartUp
from surefoot.bench.settings import PLAIN, Method, Settings
from surefoot.bench.synthetic import Continuations, SyntheticDrafter, SyntheticStep
from surefoot.bench.turns import Spread, take_turns
from surefoot.engine.arguments import parse_device, parse_dtype
from surefoot.engine.drafting import NEED_HEAD
from surefoot.engine.engine import Engine
from surefoot.engine.hardware import device_name
from surefoot.engine.loaded import LoadedModel
from surefoot.engine.runner import RunsItself
from surefoot.errors import InputError
from surefoot.kernels.linear import BlockLinear, Linear, PackedLinear
from surefoot.kernels.quantise import FLOAT8, Quantised
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


class Stages:
    """Stages with a clock: `seconds` of each that has ended, by label; `ended` are those that came before."""

    def __init__(self, stage: Stage, ended: Mapping[str, float] | None = None) -> None:
        self._stage = stage
        self.seconds = dict(ended or {})

    @contextmanager
    def __call__(self, label: str) -> Iterator[Advance]:
        """A stage: its progress is shown, its time kept."""
        start = time.perf_counter()
        with self._stage(label) as bar:
            yield bar
        self.seconds[label] = time.perf_counter() - start


def run(settings: Settings, stage: Stage = no_stage) -> Report:
    """Do all of it. Raises InputError for what was asked, CheckpointError for the files, NotLosslessError:
    then nothing has been timed."""
    (report,) = run_cells([settings], stage)
    return report


def run_cells(cells: Seq[Settings], stage: Stage = no_stage) -> Iterator[Report]:
    """The same for settings that differ in context and batch alone, over weights that are loaded once: the report of
    each cell when it is done. A cell that is not lossless ends the run."""
    first = max(cells, key=lambda cell: cell.max_len)
    if first.against is not None:
        require_transformers()
    loading = Stages(stage)
    with torch.inference_mode():
        with loading("loading") as bar:
            model = load_model(first, bar)
        if first.max_len > model.config.max_positions:
            raise InputError(f"context: expected at most {model.config.max_positions} positions with the tokens behind "
                             f"it, as the model has, found {first.max_len}")  # fmt: skip
        library = load_library(first, model)
    for settings in cells:
        with torch.inference_mode():  # not around the yield: the caller's own code runs there
            model.clear(settings.max_len)
            report = run_cell(settings, model, library, Stages(stage, loading.seconds))
        yield report


def run_cell(settings: Settings, model: LoadedModel, library: Library | None, stages: Stages) -> Report:
    """One context and batch, with a model that has room for it."""
    watch = Watch()
    bench = Bench.build(settings, model, stages)
    memory = max((engine.memory() for engine in bench.engines.values()), key=lambda memory: memory.total)
    first_token = bench.first_token(stages)
    verdict, rounds = bench.check(stages)
    bandwidth, passes = bench.time_passes(stages)
    rows, equal = bench.speeds(library, rounds, stages)
    config, decoder = model.config, model.decoder
    step = step_bytes(
        config, settings.context, settings.batch, dtype_in_memory(decoder.blocks[0].mixer.in_proj, decoder.dtype),
        head_dtype=dtype_in_memory(decoder.head, decoder.dtype),
        kv_dtype=torch.float32 if decoder.device.type == "cpu" else decoder.dtype,  # as the caches are
        draft_vocab=None if bench.draft_head is None else len(bench.draft_head.ids),
    )  # fmt: skip
    fewer = [] if rounds == settings.rounds else [
        f"{rounds} rounds in place of {settings.rounds}: more would take over {settings.seconds:g} s a drafter"
    ]  # fmt: skip
    return Report(
        model=settings.label,
        random_weights=settings.shape is not None,
        lossless=verdict,
        config=settings.resolved(list(bench.methods.values())) | {"rounds": rounds},
        sizes=asdict(config),
        device=device_name(decoder.device),
        machine=watch.machine(settings.command, versions()),
        start_up=StartUp(stages.seconds["loading"], bench.recording_s, first_token),
        memory=memory,
        step_bytes=step,
        ceiling=Ceiling.of(step, bandwidth, settings.batch),
        passes=passes,
        rows=rows,
        library_equal=equal,
        seconds=stages.seconds,
        notes=[
            *dict.fromkeys(note for engine in bench.engines.values() for note in engine.notes),
            *settings.notes,
            *fewer,
        ],
    )


@dataclass
class Bench:
    """A loaded model, the ways to decode with it, and the prompts. `texts` is what plain decoding gave; `recording_s`:
    seconds that recording a method's steps took, on a GPU."""

    settings: Settings
    model: LoadedModel
    draft_head: DraftHead | None
    methods: dict[str, Method]
    engines: dict[str, Engine]
    recording_s: dict[str, float]
    texts: Continuations
    prompts: Prompts
    params: SamplingParams

    @classmethod
    def build(cls, settings: Settings, model: LoadedModel, stages: Stages) -> Bench:
        """An engine for every method, and the prompts."""
        draft_head, _ = model.draft_head(settings.draft_vocab)  # which complains of a model without an MTP head
        methods = {method.name: method for method in settings.methods(model.head is not None)}
        texts, step, shares = Continuations(), None, settings.synthetic_acceptance
        if model.fits_kernels():
            fused = model.fused(settings.batch)
            fused.prefill_cache.keep_prompts()  # which all methods decode over the same caches
            step = SyntheticStep(fused, shares, texts) if shares else None
        engines: dict[str, Engine] = {}
        seconds: dict[str, float] = {}
        with stages("recording steps") as bar:
            for number, (name, method) in enumerate(methods.items()):

                def progress(done: int, total: int, before: int = number) -> None:
                    bar(before * total + done, len(methods) * total)

                start = time.perf_counter()
                engines[name] = make_engine(settings, model, method, texts, step, progress)
                if isinstance(engines[name].target, RunsItself):
                    seconds[name] = time.perf_counter() - start
        params = SamplingParams(max_new_tokens=settings.tokens, ignore_eos=True)
        prompts = make_prompts(settings, model)
        return cls(settings, model, draft_head, methods, engines, seconds, texts, prompts, params)

    def first_token(self, stages: Stages) -> float:
        """Seconds from the first prompt to its first token, decoded plainly; nothing has been read before."""
        prompt, one = self.prompts[0][0], replace(self.params, max_new_tokens=1)
        with stages("reading the first prompt") as bar:
            start = time.perf_counter()
            list(self.engines[PLAIN].stream(prompt, one, progress=bar))
            return time.perf_counter() - start

    def check(self, stages: Stages) -> tuple[Verdict, int]:
        """Decode every prompt by every method, and compare; compare windows with single steps. Also how many rounds a
        method has the time for. Warms up, too."""
        s = self.settings
        outputs: dict[str, Outputs] = {name: [] for name in self.engines}
        seconds = dict.fromkeys(self.engines, 0.0)
        with stages("checking that no token changes") as bar:
            for number, batch in enumerate(self.prompts):
                for done, (name, engine) in enumerate(self.engines.items()):
                    bar(number * len(self.engines) + done, len(self.prompts) * len(self.engines))
                    sample = decode(engine, batch, self.params)
                    outputs[name] += sample.outputs
                    seconds[name] += sample.seconds.decode_s
                    if name == PLAIN:
                        self.texts.learn(batch, sample.outputs)
            check_outputs(outputs)
            with self._passes() as passes:
                sizes = [size for size in passes.sizes if size > 1]
                positions = check_windows(passes, sizes)
        verdict = Verdict(True, list(outputs), s.batches * s.batch, s.batch, s.tokens, sizes, positions)
        return verdict, max(1, min(s.rounds, int(s.seconds / max(seconds.values()))))

    def time_passes(self, stages: Stages) -> tuple[float, dict[str, Spread]]:
        """The device's read bandwidth in bytes/s, and milliseconds of single passes."""
        rounds = self.settings.rounds
        read, size = reader(self.model.decoder.device)
        with stages("timing passes") as bar, self._passes() as passes:
            passes.start()
            actions = passes.actions() | {"read": read}
            turn = counted(bar, len(actions) * rounds)
            times = take_turns(actions, rounds, passes.rewind, passes.wait, passes.calls, turn)
        return 1000 * size / times.pop("read").median, times

    def speeds(self, library: Library | None, rounds: int, stages: Stages) -> tuple[list[Row], int | None]:
        """A row for every method; for how many prompts `transformers` gave the same tokens."""
        actions: dict[str, Callable[[Batch], Sample]] = {}
        if library is not None:
            actions[LIBRARY] = partial(decode_library, library, tokens=self.settings.tokens)
        for name, engine in self.engines.items():
            actions[name] = partial(decode, engine, params=self.params)
        with stages("measuring") as bar:
            if library is not None:
                actions[LIBRARY](self.prompts[0])  # warms up
            turn = counted(bar, len(actions) * rounds * len(self.prompts))
            samples = measure(actions, self.prompts, rounds, free=[LIBRARY], turn=turn)
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

            yield FusedPasses(model.fused(s.batch), self.prompts[-1], self.draft_head)  # which its slots hold already
            return
        passes = EagerPasses(model.target(s.batch), model.head, s.context, draft_head=self.draft_head)
        yield passes
        passes.close()


def counted(bar: Advance, total: int) -> Callable[[], None]:
    """An action that moves the bar on by one."""
    done = itertools.count(1)
    return lambda: bar(next(done), total)


def dtype_in_memory(layer: Linear, dtype: torch.dtype) -> torch.dtype:
    """Of the layer's weight in a model of `dtype`."""
    if isinstance(layer, PackedLinear):
        return layer.held
    narrow = isinstance(layer, BlockLinear) and isinstance(layer.weight, Quantised)
    return FLOAT8 if narrow else dtype


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
                                       mtp="require" if needs_head else "if-present", weights=settings.weights,
                                       progress=progress)  # fmt: skip


def load_library(settings: Settings, model: LoadedModel) -> Library | None:
    """The same weights in `transformers`, if they were asked for."""
    if settings.against is None:
        return None
    device, dtype = str(model.decoder.device), parse_dtype(settings.dtype)
    if settings.shape is not None:
        tensors = random_tensors(model.config, settings.seed, device, dtype)
        return Library.from_tensors(model.config, tensors, dtype, device)
    assert settings.model is not None
    return Library.from_folder(find_model(settings.model), model.config.moe is not None, dtype, device)


def make_engine(
    settings: Settings, model: LoadedModel, method: Method, texts: Continuations, step: SyntheticStep | None,
    progress: Advance,
) -> Engine:  # fmt: skip
    """The method's engine; where acceptance is set, one that overwrites drafts with what `texts` will know: in `step`,
    if the device has steps of its own."""
    slots, vocabulary = settings.batch, settings.draft_vocab if method.drafter in NEED_HEAD else None
    if not settings.sets_acceptance(method):
        return Engine.over(model, drafter=method.drafter, draft_length=method.depth, slots=slots,
                           draft_vocab=vocabulary, progress=progress)  # fmt: skip
    draft_head, said = model.draft_head(vocabulary)
    target: Target | RunsItself | None = model.device_target(
        method.drafter, method.depth, slots, draft_head, overwrite=step, progress=progress
    )
    if isinstance(target, RunsItself):
        drafter: Drafter = target.drafter
    else:
        target, inner = model.target(slots), model.drafter(method.drafter, slots, draft_head)
        drafter = SyntheticDrafter(inner, settings.synthetic_acceptance, texts, model.config.vocab_size)
    return Engine(target, drafter, method.depth, notes=[*model.notes, *said])


def make_prompts(settings: Settings, model: LoadedModel) -> Prompts:
    """Batches of texts of `context` tokens."""
    count = settings.batches * settings.batch
    if model.tokenizer is None:
        flat = random_prompts(model.config.vocab_size, count, settings.context)
    else:
        flat = text_prompts(model.tokenizer, count, settings.context)
    return [flat[i : i + settings.batch] for i in range(0, count, settings.batch)]
