"""Published shapes with random weights: speed does not depend on their values."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import checkout
from benchmarks.report import Shape
from surefoot import Engine, SamplingParams
from surefoot.bench.cost import step_bytes
from surefoot.bench.library import Library
from surefoot.bench.lossless import check_windows
from surefoot.bench.machine import Watch
from surefoot.bench.passes import EagerPasses
from surefoot.bench.prompts import random_tokens
from surefoot.bench.turns import BURST, Action, nothing, take_turns
from surefoot.config import ModelConfig
from surefoot.drafters.none import NoDrafter
from surefoot.engine.arguments import DTYPES
from surefoot.engine.target import DecoderTarget
from surefoot.loading import shapes as published
from surefoot.loading.tiny import tiny_config
from surefoot.model import Decoder, MTPHead
from surefoot.model.tensors import mtp_shapes, target_shapes

SIZES = (1, 2, 3, 4, 5, 8)
CHECKED = range(2, 10)
SEED = 0
READ_BYTES = 2**30  # far more than any cache
KEPT_FLOAT32 = (".A_log", ".dt_bias", ".linear_attn.norm.weight")  # as loading keeps them


SHAPES = {"tiny": replace(tiny_config(), tied=True), **published.SHAPES}


def run(name: str, dtype: str, context: int, rounds: int) -> Shape:
    """The lossless check, then the times, both models taking turns if memory holds both."""
    watch = Watch()
    config = SHAPES[name]
    together = fits_twice(config, DTYPES[dtype])
    read = torch.ones(READ_BYTES // 4)
    steps: dict[str, float]
    checked, steps = measure_ours(config, DTYPES[dtype], context, rounds, read, together)
    if not together:
        gc.collect()
        steps |= medians(library_actions(config, DTYPES[dtype], context), rounds)
    bandwidth = read.nbytes / (steps.pop("read") / 1000)
    weights = step_bytes(config, context, 1, DTYPES[dtype]).weights
    return Shape(name, dtype, context, rounds, checked, together, weights, bandwidth, steps, checkout.machine(watch))


def measure_ours(
    config: ModelConfig, dtype: torch.dtype, context: int, rounds: int, read: Tensor, together: bool
) -> tuple[int, dict[str, float]]:
    """Positions checked, and milliseconds; nothing of the model outlives the call."""
    tensors = draw(config, dtype)
    decoder = Decoder(config, tensors, max_len=context + (rounds + 1) * (BURST + 1) + 64)
    head = MTPHead(decoder, tensors)
    tensors.clear()
    passes = EagerPasses(DecoderTarget(decoder, slots=1), head, context, SIZES)
    checked = check_windows(passes, CHECKED)
    actions = passes.actions() | {"plain": plain_action(decoder, context), "read": read.sum}
    if together:
        actions |= library_actions(config, dtype, context)
    return checked, medians(actions, rounds, passes.rewind)


def plain_action(decoder: Decoder, context: int) -> Action:
    """One more token by the engine's own loop, on caches of its own."""
    engine = Engine(DecoderTarget(decoder, slots=1), NoDrafter(), 0)
    stream = engine.stream(random_tokens(decoder.config.vocab_size, context), SamplingParams(max_new_tokens=10**6))
    return lambda: next(stream)


def library_actions(config: ModelConfig, dtype: torch.dtype, context: int) -> dict[str, Action]:
    model = Library.from_tensors(config, draw(config, dtype), dtype)
    return {"transformers": model.stepper(random_tokens(config.vocab_size, context))}


def medians(actions: Mapping[str, Action], rounds: int, before: Action = nothing) -> dict[str, float]:
    return {name: spread.median for name, spread in take_turns(actions, rounds, before).items()}


def draw(config: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights that keep activations of order one, the same at every call, without a float32 copy of the whole."""
    generator = torch.Generator().manual_seed(SEED)
    tensors = {}
    for name, shape in (target_shapes(config) | mtp_shapes(config)).items():
        scale = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
        values = torch.randn(shape, generator=generator).mul_(scale)
        tensors[name] = values if name.endswith(KEPT_FLOAT32) else values.to(dtype)
    return tensors


def fits_twice(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether memory holds our model (with its packed head beside the embedding), the library's and some room."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return available > 3 * step_bytes(config, 0, 1, dtype).weights + READ_BYTES + 2**31
