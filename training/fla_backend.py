"""The gated delta rule on the GPU through flash-linear-attention, checked before it is trusted.

Some Triton releases miscompile one of the library's backward kernels on Hopper chips, and the
library then refuses to run it. :func:`fla_delta_rule` therefore tries the kernel's launch
configurations one by one against the same formula in batched PyTorch products, keeps the first
that agrees, and falls back to the PyTorch version when none does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CHUNK = 64
Backward = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


def chunk_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    w: Tensor,
    g: Tensor,
    dv: Tensor,
    scale: float,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, the state keys w and the decay, chunk by chunk, in batched products.

    q, k [B, T, Hk, dk]; v (new values), do, dv [B, T, Hv, dv]; w [B, T, Hv, dk]; h, dh
    [B, T/64, Hv, dk, dv]; g [B, T, Hv], base-2 log decay summed from each chunk's start.
    Returns dq, dk like q, dw like w and dg like g (not yet summed backwards).
    """
    rows, length, key_heads, size = k.shape
    heads = v.shape[2]
    if length % CHUNK:
        raise ValueError(f"sequence length: expected a multiple of {CHUNK}, found {length}")

    def split(x: Tensor) -> Tensor:
        """[B, T, heads, d] -> [B, chunks, Hv, 64, d]."""
        x = x.view(rows, -1, CHUNK, x.shape[2], x.shape[3]).transpose(2, 3)
        return x if x.shape[2] == heads else x.repeat_interleave(heads // key_heads, 2)

    def join(x: Tensor) -> Tensor:
        """[B, chunks, Hv, 64, d] -> [B, T, Hv, d]."""
        return x.transpose(2, 3).reshape(rows, length, heads, -1)

    queries, keys, values, upstream, values_back = split(q), split(k), split(v), split(do), split(dv)
    decay = split(g.unsqueeze(-1)).squeeze(-1).float()
    last = decay[..., -1:]
    states, states_back = h.to(v.dtype), dh.to(v.dtype)
    d_last = (h.float() * dh.float()).sum((-1, -2)) * torch.exp2(last[..., 0])
    d_query = (upstream @ states.transpose(-1, -2)).float() * torch.exp2(decay).unsqueeze(-1) * scale
    d_key = (values @ states_back.transpose(-1, -2)).float() * torch.exp2(last - decay).unsqueeze(-1)
    d_last = d_last + (d_key * keys).sum((-1, -2))
    d_state_key = -(values_back.to(v.dtype) @ states.transpose(-1, -2))
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    ratio = torch.exp2((decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~lower, -torch.inf))
    d_scores = ((upstream @ values.transpose(-1, -2)).float() * ratio * scale).to(k.dtype)
    d_query = d_query + d_scores @ keys
    d_key = d_key + d_scores.transpose(-1, -2) @ queries
    d_decay = (d_query * queries).sum(-1) - (d_key * keys).sum(-1)
    d_decay[..., -1] += d_last
    dq, dk = join(d_query), join(d_key)
    share = heads // key_heads
    dq = dq.view(rows, length, key_heads, share, size).sum(3).to(q.dtype)
    dk = dk.view(rows, length, key_heads, share, size).sum(3).to(k.dtype)
    return dq, dk, join(d_state_key).to(w.dtype), join(d_decay.unsqueeze(-1)).squeeze(-1)


def _autotuner(kernel: Any) -> Any:
    """The autotuner inside a decorated Triton kernel."""
    while not hasattr(kernel, "configs"):
        kernel = kernel.fn
    return kernel


def _distance(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """Largest relative distance over the results; not a number counts as infinite."""
    worst = 0.0
    for a, b in zip(found, wanted, strict=True):
        value = ((a.float() - b.float()).norm() / b.float().norm()).item()
        worst = max(worst, value if value == value else float("inf"))
    return worst


def fla_delta_rule(
    log: Callable[[str], None] = print, tolerance: float = 2e-2, backward: bool = True
) -> Callable[..., Tensor]:
    """The delta rule of :mod:`model` on CUDA, bf16 in and out, with a backward pass that was checked.

    Without ``backward`` the check is skipped and the function serves inference alone.
    """
    import fla.ops.common.chunk_o as chunk_o
    import fla.ops.gated_delta_rule.chunk as chunk

    fallback: Backward = torch.compile(chunk_gradients, dynamic=False)
    library = chunk_o.chunk_bwd_dqkwg
    while hasattr(library, "__wrapped__"):
        library = inspect.unwrap(library)
    chunk_o.IS_NVIDIA_HOPPER = False  # the check below takes the place of the library's refusal
    tuner = _autotuner(chunk_o.chunk_bwd_kernel_dqkwg)
    captured: list[dict[str, Any]] = []

    def capture(**arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        captured.append(arguments)
        return chunk_gradients(**arguments)

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        output: Tensor = chunk.chunk_gated_delta_rule(q, k, v, g, beta)[0]
        return output

    if not backward:
        return rule

    # Real intermediate tensors of three random problems, one with fast decay, one with slow.
    chunk.chunk_bwd_dqkwg = capture
    for seed, speed in ((0, 1.0), (1, 0.05), (2, 8.0)):
        inputs = random_problem(seed, speed)
        torch.autograd.backward(rule(*inputs), torch.randn_like(inputs[2]))
    chosen: Any = None
    candidates = list(tuner.configs)
    for config in candidates:
        tuner.configs = [config]
        tuner.cache.clear()
        try:
            worst = max(_distance(library(**case), chunk_gradients(**case)) for case in captured for _ in range(2))
        except Exception as error:
            log(f"backward kernel {config}: {type(error).__name__}: {str(error)[:120]}")
            continue
        log(f"backward kernel {config}: distance {worst:.1e}")
        if worst < tolerance:
            chosen = config
            break
    if chosen is None:
        log("backward kernel: none agrees, batched PyTorch products take its place")
        chunk.chunk_bwd_dqkwg = fallback
    else:
        log(f"backward kernel: {chosen}")
        chunk.chunk_bwd_dqkwg = library
    return rule


def random_problem(
    seed: int, speed: float, rows: int = 2, length: int = 512, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """q, k, v, g, beta of the bundled model's sizes that need gradients; ``speed`` scales the decay."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    q = torch.nn.functional.normalize(normal(rows, length, 4, 64), dim=-1).to(dtype)
    k = torch.nn.functional.normalize(normal(rows, length, 4, 64), dim=-1).to(dtype)
    v = normal(rows, length, 8, 64).to(dtype)
    g = -torch.nn.functional.softplus(normal(rows, length, 8)) * speed
    beta = normal(rows, length, 8).sigmoid()
    return [x.requires_grad_() for x in (q, k, v, g, beta)]
