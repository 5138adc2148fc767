"""The prefill kernels against their references, and the prefill pass built on them against the plain one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.cache import KVCache
from surefoot.kernels.fused import bulk, chunk
from surefoot.kernels.linear import LinearFactory
from surefoot.loading.tiny import tiny_config
from surefoot.model import Decoder, MTPHead, build_cache
from surefoot.model.bulk import read_blocks
from surefoot.model.tensors import random_tensors

TEXT = 70
TYPES = [torch.float32, torch.float16]


def noise(device: torch.device, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def blank(like: Tensor, *shape: int) -> Tensor:
    return like.new_full(shape, torch.nan)


def close(found: Tensor, expected: Tensor) -> None:
    limit = 2e-5 if found.dtype == torch.float32 else 2e-3
    torch.testing.assert_close(found, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("adds", [False, True])
def test_add_norm(device: torch.device, dtype: torch.dtype, adds: bool) -> None:
    results = []
    for run in (bulk.add_norm_reference, bulk.add_norm):
        x = noise(device, 5, 48)
        added = noise(device, 5, 48, seed=1, dtype=dtype) if adds else None
        out = blank(noise(device, 1, dtype=dtype), 5, 48)
        run(x, added, noise(device, 48, seed=2), out, eps=1e-6)
        results.append((x, out))
    assert torch.equal(results[0][0], results[1][0])
    close(results[1][1], results[0][1])


@pytest.mark.parametrize("dtype", TYPES)
def test_swiglu(device: torch.device, dtype: torch.dtype) -> None:
    gate_up = noise(device, 3, 2 * 1500, dtype=dtype)
    expected, found = (blank(gate_up, 3, 1500) for _ in range(2))
    bulk.swiglu_reference(gate_up, expected)
    bulk.swiglu(gate_up, found)
    close(found, expected)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("position", [0, 1, 37])
def test_place_heads(device: torch.device, dtype: torch.dtype, position: int) -> None:
    tokens, heads, kv_heads, dim, rotary = 35, 3, 2, 24, 8
    merged = noise(device, tokens, (heads + 2 * kv_heads) * dim + 5, dtype=dtype)
    scales = [noise(device, dim, seed=seed) for seed in (1, 2)]
    tables = [noise(device, 100, rotary, seed=seed) for seed in (3, 4)]
    results = []
    for run in (bulk.place_heads_reference, bulk.place_heads):
        caches = blank(merged, 2, kv_heads, 100, dim)
        query = blank(merged, tokens, heads, dim)
        run(merged, scales[0], scales[1], tables[0], tables[1], caches[0], caches[1], query,
            position=position, eps=1e-6)  # fmt: skip
        written = caches[:, :, position : position + tokens].clone()
        caches[:, :, position : position + tokens] = torch.nan
        assert caches.isnan().all()
        results.append((query, written))
    for found, expected in zip(results[1], results[0], strict=True):
        close(found, expected)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_conv_heads(device: torch.device, dtype: torch.dtype, tokens: int) -> None:
    key_heads, dim = 2, 12
    channels = 2 * key_heads * dim + 30
    merged = noise(device, tokens, channels + 7, dtype=dtype)
    past, taps = noise(device, 3, channels, seed=1), noise(device, 4, channels, seed=2)
    expected, found = (blank(merged, tokens, channels) for _ in range(2))
    bulk.conv_heads_reference(merged, past, taps, expected, key_heads=key_heads, dim=dim)
    bulk.conv_heads(merged, past, taps, found, key_heads=key_heads, dim=dim)
    close(found, expected)


@pytest.mark.parametrize("dtype", TYPES)
def test_gated_norm(device: torch.device, dtype: torch.dtype) -> None:
    x, merged = noise(device, 33, 3, 12, dtype=dtype), noise(device, 33, 50, seed=1, dtype=dtype)
    expected, scale = blank(x, 33, 3, 12), noise(device, 12, seed=2)
    bulk.gated_norm_reference(x, merged[:, 7:43], scale, expected, eps=1e-6)
    bulk.gated_norm(x, merged[:, 7:43], scale, x, eps=1e-6)  # in place
    close(x, expected)


def delta_inputs(
    device: torch.device, tokens: int, dims: tuple[int, int], dtype: torch.dtype, alike: bool = False
) -> tuple[Tensor, chunk.DeltaGates, Tensor]:
    """Two key heads of two value heads each; all keys the same one if `alike`."""
    pairs = noise(device, tokens, 4, dims[0])
    if alike:
        pairs[:] = pairs[0].clone()
    pairs = torch.nn.functional.normalize(pairs, dim=-1).flatten(1)
    mixed = torch.cat([pairs, noise(device, tokens, 4 * dims[1], seed=1)], dim=1).to(dtype)
    logits = noise(device, tokens, 2 * 32 + 3, seed=2, dtype=dtype)[:, 3:]
    if alike:
        logits[:, :32], logits[:, 32:] = 6.0, -8.0  # beta about 1, hardly any decay
    gates = chunk.DeltaGates(logits, -noise(device, 4, seed=3).abs(), noise(device, 4, seed=4))
    return mixed, gates, noise(device, 2, dims[0], 2 * dims[1], seed=5)


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("dims", [(8, 12), (32, 64)])
@pytest.mark.parametrize("tokens", [1, 63, 64, 150])
def test_delta_chunk(device: torch.device, tokens: int, dims: tuple[int, int], alike: bool) -> None:
    mixed, gates, state = delta_inputs(device, tokens, dims, torch.float32, alike)
    results = []
    for run in (chunk.delta_chunk_reference, chunk.delta_chunk):
        work = chunk.ChunkWorkspace.allocate(tokens, 4, dims, mixed)
        for tensor in vars(work).values():
            tensor.fill_(torch.nan)
        out, new_state = blank(mixed, tokens, 4, dims[1]), torch.full_like(state, torch.nan)
        run(mixed, gates, state, work, out, new_state)
        results.append((out, new_state))
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("alike", [False, True])
def test_delta_chunk_in_16_bits(device: torch.device, alike: bool) -> None:
    """Errors of a 16-bit state operand do not grow along the chunks."""
    dims = 16, 16
    mixed, gates, state = delta_inputs(device, 300, dims, torch.float16, alike)
    results = []
    for run, given in ((chunk.delta_chunk_reference, mixed.float()), (chunk.delta_chunk, mixed)):
        out, new_state = blank(mixed, 300, 4, dims[1]), torch.full_like(state, torch.nan)
        run(given, gates, state, chunk.ChunkWorkspace.allocate(300, 4, dims, given), out, new_state)
        results.append((out.float(), new_state))
    for found, expected in zip(results[1], results[0], strict=True):
        assert (found - expected).norm() < 3e-3 * expected.norm()


@pytest.mark.parametrize("moe", [False, True])
def test_prefill_agrees_with_the_plain_pass(device: torch.device, moe: bool) -> None:
    """In two chunks, the second shorter than the convolution, in either slot."""
    config = tiny_config(moe=moe)
    tensors = random_tensors(config, 0, device)
    decoder = Decoder(config, tensors, TEXT + 1, LinearFactory(pack=False))
    head = MTPHead(decoder, tensors)
    text = torch.randint(0, 260, (TEXT + 1,), generator=torch.Generator().manual_seed(0)).to(device)
    expected = plain_prefill(decoder, head, text, device)
    slots = []
    for slot in (0, 1):
        cache, lane = build_cache(config, 2, TEXT, torch.float32, device), head.build_lane(2)
        hidden, drafts = [], []
        for start, stop in ((0, TEXT - 2), (TEXT - 2, TEXT)):
            x = decoder.embed(text[start:stop])
            read_blocks(decoder.blocks, cache.layers, x, decoder.rope, slot, start)
            hidden.append(decoder.norm(x))
            y = head.fc.bulk(head._inputs(hidden[-1], decoder.embed(text[start + 1 : stop + 1])))
            read_blocks([head.block], [lane], y, decoder.rope, slot, start)
            drafts.append(head.norm(y))
        slots.append([torch.cat(hidden), torch.cat(drafts), *snapshot(cache.layers, slot), *lane.read(slot, TEXT)])
    for first, second, plain in zip(*slots, expected, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, plain, rtol=1e-3, atol=1e-3)


def plain_prefill(decoder: Decoder, head: MTPHead, text: Tensor, device: torch.device) -> list[Tensor]:
    cache, lane = build_cache(decoder.config, 2, TEXT, torch.float32, device), head.build_lane(2)
    rope = decoder.rope.at(torch.arange(TEXT, device=device))
    x = decoder.embed(text[:TEXT])
    for block, layer in zip(decoder.blocks, cache.layers, strict=True):
        x = block.prefill(x, rope, layer, 0, 0)
    hidden = decoder.norm(x)
    y = head.fc.bulk(head._inputs(hidden, decoder.embed(text[1:])))
    drafts = head.norm(head.block.prefill(y, rope, lane, 0, 0))
    return [hidden, drafts, *snapshot(cache.layers, 0), *lane.read(0, TEXT)]


def snapshot(layers: list, slot: int) -> list[Tensor]:  # type: ignore[type-arg]
    parts = []
    for layer in layers:
        if isinstance(layer, KVCache):
            parts += [part.clone() for part in layer.read(slot, TEXT)]
        else:
            parts += [layer.read_state(slot).clone(), layer.conv_past(slot).clone()]
    return parts
