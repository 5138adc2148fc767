"""Published shapes with random weights: speed does not depend on their values."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import reference
from benchmarks.machine import Watch
from benchmarks.report import Shape
from benchmarks.steps import BURST, Action, check_windows, fill, random_tokens, step_actions, take_turns
from surefoot import Engine, SamplingParams
from surefoot.config import LayerType, ModelConfig
from surefoot.drafters.none import NoDrafter
from surefoot.engine.engine import DTYPES
from surefoot.engine.target import DecoderTarget
from surefoot.loading.tiny import tiny_config
from surefoot.model import Decoder, MTPHead
from surefoot.model.tensors import mtp_shapes, target_shapes

SIZES = (1, 2, 3, 4, 5, 8)
SEED = 0
READ_BYTES = 2**30  # far more than any cache
KEPT_FLOAT32 = (".A_log", ".dt_bias", ".linear_attn.norm.weight")  # as loading keeps them


def qwen(hidden: int, layers: int, heads: int, kv_heads: int, value_heads: int, ffn: int) -> ModelConfig:
    """A tied, dense Qwen3.5 with what all published sizes share."""
    kinds: tuple[LayerType, ...] = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
    return ModelConfig(
        vocab_size=248320, hidden_size=hidden, layer_types=kinds * (layers // 4), num_heads=heads,
        num_kv_heads=kv_heads, head_dim=256, rotary_dim=64, rope_theta=1e7, linear_key_heads=16,
        linear_value_heads=value_heads, linear_key_dim=128, linear_value_dim=128, ffn_width=ffn, tied=True,
        mtp_layers=1,
    )  # fmt: skip


SHAPES = {
    "tiny": replace(tiny_config(), tied=True),
    "qwen3.5-0.8b": qwen(1024, 24, 8, 2, 16, 3584),
    "qwen3.5-2b": qwen(2048, 24, 8, 2, 16, 6144),
    "qwen3.5-4b": qwen(2560, 32, 16, 4, 32, 9216),
}


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
        steps |= take_turns(library_actions(config, DTYPES[dtype], context), rounds)
    bandwidth = read.nbytes / (steps.pop("read") / 1000)
    weights = token_bytes(config, DTYPES[dtype])
    return Shape(name, dtype, context, rounds, checked, together, weights, bandwidth, steps, watch.machine())


def measure_ours(
    config: ModelConfig, dtype: torch.dtype, context: int, rounds: int, read: Tensor, together: bool
) -> tuple[int, dict[str, float]]:
    """Positions checked, and milliseconds; nothing of the model outlives the call."""
    tensors = draw(config, dtype)
    decoder = Decoder(config, tensors, max_len=context + (rounds + 1) * (BURST + 1) + 64)
    head = MTPHead(decoder, tensors)
    tensors.clear()
    target = DecoderTarget(decoder, slots=1)
    checked = check_windows(target, context)
    fill(target, context)
    actions = step_actions(target, head, SIZES, context) | {"plain": plain_action(decoder, context), "read": read.sum}
    if together:
        actions |= library_actions(config, dtype, context)
    return checked, take_turns(actions, rounds, lambda: target.rewind(0))


def plain_action(decoder: Decoder, context: int) -> Action:
    """One more token by the engine's own loop, on caches of its own."""
    engine = Engine(DecoderTarget(decoder, slots=1), NoDrafter(), 0)
    stream = engine.stream(random_tokens(decoder.config.vocab_size, context), SamplingParams(max_new_tokens=10**6))
    return lambda: next(stream)


def library_actions(config: ModelConfig, dtype: torch.dtype, context: int) -> dict[str, Action]:
    model = reference.from_tensors(config, draw(config, dtype), dtype)
    return {"transformers": reference.stepper(model, random_tokens(config.vocab_size, context))}


def draw(config: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights that keep activations of order one, the same at every call, without a float32 copy of the whole."""
    generator = torch.Generator().manual_seed(SEED)
    tensors = {}
    for name, shape in (target_shapes(config) | mtp_shapes(config)).items():
        scale = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
        values = torch.randn(shape, generator=generator).mul_(scale)
        tensors[name] = values if name.endswith(KEPT_FLOAT32) else values.to(dtype)
    return tensors


def token_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of weights that decoding a token reads: all but the MTP head and, if the LM head is another tensor, the
    embedding table."""
    shapes: Mapping[str, tuple[int, ...]] = target_shapes(config)
    read = [shape for name, shape in shapes.items() if config.tied or "embed_tokens" not in name]
    return sum(math.prod(shape) for shape in read) * dtype.itemsize


def fits_twice(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether memory holds our model (with its packed head beside the embedding), the library's and some room."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return available > 3 * token_bytes(config, dtype) + READ_BYTES + 2**31
