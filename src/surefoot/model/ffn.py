"""The feed-forward blocks: SwiGLU, and a mixture of SwiGLU experts with a gated shared one."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from surefoot.config import ModelConfig
from surefoot.kernels.experts import PackedExperts, pack_experts
from surefoot.kernels.linear import Linear, LinearFactory
from surefoot.kernels.quantise import Weight
from surefoot.kernels.rows import MIN_ROWS, by_row, silu_mul
from surefoot.model.tensors import Weights, whole


class SwiGLU:
    """(silu(x gate^T) * (x up^T)) down^T; gate and up are one product."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up, self.down = gate_up, down

    def decode(self, x: Tensor) -> Tensor:
        """x [n, H] -> [n, H], n >= 2; rows do not depend on n."""
        return self.down(silu_mul(*self.gate_up(x).chunk(2, dim=-1)))

    def prefill(self, x: Tensor) -> Tensor:
        """The same for many rows."""
        gate, up = self.gate_up.bulk(x).chunk(2, dim=-1)
        return self.down.bulk(torch.nn.functional.silu(gate).mul_(up))


class MoE:
    """Top-k of E experts, weights softmaxed over all experts and renormalised over the chosen ones, plus
    sigmoid(x shared_expert_gate^T) * shared_expert(x).

    Where weights are read as they are (`LinearFactory.keeps`) all experts lie in `packed`, for kernels that want them
    so, and the source tensors are taken out of `tensors`.
    """

    def __init__(self, config: ModelConfig, tensors: Weights, prefix: str, linear: LinearFactory) -> None:
        assert config.moe is not None
        self.top = config.moe.experts_per_token
        self.packed: PackedExperts | None = None
        if linear.keeps(whole(tensors, prefix + "gate.weight").device):
            self.packed = pack_experts(lambda name: tensors.pop(prefix + name), linear.cut)
            router, shared_gate = self.packed.router[:-1], self.packed.router[-1:]
            *experts, self._shared = _each(self.packed.gate_up, self.packed.down, linear)
        else:
            router, shared_gate = (
                whole(tensors, prefix + name) for name in ("gate.weight", "shared_expert_gate.weight")
            )
            self._shared = _swiglu(tensors, prefix + "shared_expert.", linear)
            experts = _each(tensors[prefix + "experts.gate_up_proj"], tensors[prefix + "experts.down_proj"], linear)
        self._experts = experts
        self._router: Linear = linear.whole(router)
        self._shared_gate: Linear = linear.whole(shared_gate)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """For many rows x [n, H]: the experts that each row reads in `packed` [n, k + 1], the shared one last, and what
        their outputs count [n, k + 1] float32."""
        chosen, weight = self._route(self._router.bulk(x))
        shared = torch.full_like(chosen[:, :1], len(self._experts))
        share = torch.cat([weight, self._shared_gate.bulk(x).sigmoid()], dim=1)
        return torch.cat([chosen, shared], dim=1), share

    def decode(self, x: Tensor) -> Tensor:
        """x [n, H] -> [n, H]; each expert sees its rows as a block of its own."""
        chosen, weight = self._route(self._router(x))
        shared = self._shared.decode(x).mul_(by_row(torch.sigmoid, self._shared_gate(x)))
        return self._add_experts(x, chosen, weight, shared, bulk=False)

    def prefill(self, x: Tensor) -> Tensor:
        """The same for many rows."""
        chosen, weight = self._route(self._router.bulk(x))
        shared = self._shared.prefill(x).mul_(self._shared_gate.bulk(x).sigmoid())
        return self._add_experts(x, chosen, weight, shared, bulk=True)

    def _route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Router scores [n, E] -> chosen experts [n, k] and their weights [n, k]. Row by row: softmax and top-k over
        the last axis treat each row alone, once there are two."""
        weight, chosen = scores.softmax(-1).topk(self.top, dim=-1)
        return chosen, weight / weight.sum(-1, keepdim=True)

    def _add_experts(self, x: Tensor, chosen: Tensor, weight: Tensor, out: Tensor, bulk: bool) -> Tensor:
        """Add the experts' outputs to `out` in place, in the order of their numbers (so in one order per row)."""
        for expert in chosen.unique().tolist():
            rows, rank = (chosen == expert).nonzero(as_tuple=True)
            block = x[rows]
            if block.shape[0] < MIN_ROWS:
                block = block.repeat(MIN_ROWS, 1)
            run = self._experts[expert].prefill if bulk else self._experts[expert].decode
            out.index_add_(0, rows, run(block)[: rows.shape[0]] * weight[rows, rank].unsqueeze(-1))
        return out


FeedForward = SwiGLU | MoE


def build_ffn(config: ModelConfig, tensors: Weights, prefix: str, linear: LinearFactory) -> FeedForward:
    """The config's feed-forward block from tensors `prefix + ...`."""
    if config.moe is not None:
        return MoE(config, tensors, prefix, linear)
    return _swiglu(tensors, prefix, linear)


def _swiglu(tensors: Weights, prefix: str, linear: LinearFactory) -> SwiGLU:
    gate, up, down = (tensors[f"{prefix}{n}_proj.weight"] for n in ("gate", "up", "down"))
    return SwiGLU(linear(gate, up), linear(down))


def _each(gate_up: Weight, down: Weight, linear: LinearFactory) -> list[SwiGLU]:
    """Experts of gate_up [E, 2 * I, H] and down [E, H, I], no copies of their own where the factory keeps weights."""
    firsts: Seq[Weight] = gate_up.unbind()
    seconds: Seq[Weight] = down.unbind()
    return [SwiGLU(linear(first), linear(second)) for first, second in zip(firsts, seconds, strict=True)]
