"""The delta rule's window and chunk forms against the formula, and the tape against the states it stands for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.kernels import gated_delta

HK, DK, DV = 3, 12, 20


def inputs(tokens: int, ratio: int, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.nn.functional.normalize(torch.randn(tokens, HK, DK, generator=g), dim=-1) for _ in range(2))
    heads = HK * ratio
    return {
        "q": q * DK**-0.5,
        "k": k,
        "v": torch.randn(tokens, heads, DV, generator=g),
        "log_decay": -torch.rand(tokens, heads, generator=g),
        "beta": torch.rand(tokens, heads, generator=g),
        "state": torch.randn(HK, DK, ratio * DV, generator=g),
    }


def run_window(x: dict[str, Tensor], state: Tensor, ahead: Tensor) -> tuple[Tensor, gated_delta.Tape]:
    """The window form with the formula's arguments: (o [T, Hv, Dv], tape)."""
    tokens, ratio = x["v"].shape[0], x["v"].shape[1] // HK

    def spread(gate: Tensor) -> Tensor:
        return gate.unsqueeze(-1).expand(-1, -1, DV).reshape(tokens, HK, 1, ratio * DV)

    decay, beta = spread(x["log_decay"].exp()), spread(x["beta"])
    q, k, v = x["q"].unsqueeze(2), x["k"].unsqueeze(2), x["v"].reshape(tokens, HK, 1, -1)
    out = torch.empty_like(v)
    tape = gated_delta.window(
        q.unbind(), k.unbind(), v.unbind(), decay.unbind(), beta.unbind(), state, ahead, out.unbind()
    )
    return out.view(tokens, HK * ratio, DV), tape


@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 2, 5, 63])
def test_window_and_chunk_equal_the_formula(tokens: int, ratio: int) -> None:
    x = inputs(tokens, ratio)
    expected, end = gated_delta.recurrent_reference(**x)
    out, state = gated_delta.chunk(x["q"], x["k"], x["v"], x["log_decay"], x["beta"], x["state"], size=16)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(state, end, atol=2e-5, rtol=2e-5)
    base, ahead = x["state"].clone(), torch.full_like(x["state"], torch.nan)
    out, tape = run_window(x, base, ahead)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(base if tokens == 1 else ahead, end, atol=1e-5, rtol=1e-5)
    assert len(tape) == tokens


@pytest.mark.parametrize("tokens", [64, 65, 150, 500])
def test_chunk_at_its_own_size(tokens: int) -> None:
    x = inputs(tokens, 2, seed=tokens)
    expected, end = gated_delta.recurrent_reference(**x)
    out, state = gated_delta.chunk(x["q"], x["k"], x["v"], x["log_decay"], x["beta"], x["state"])
    torch.testing.assert_close(out, expected, atol=5e-5, rtol=5e-5)
    torch.testing.assert_close(state, end, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("keep", range(1, 7))
def test_replay_gives_the_bits_of_single_steps(keep: int) -> None:
    x = inputs(6, 2)
    single = x["state"].clone()
    for t in range(keep):
        run_window({n: v if n == "state" else v[t : t + 1] for n, v in x.items()}, single, torch.empty_like(single))
    base = x["state"].clone()
    _, tape = run_window(x, base, torch.empty_like(base))
    tape.replay_(base, 1, keep)
    assert torch.equal(base, single)
