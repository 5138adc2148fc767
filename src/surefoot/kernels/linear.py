"""Linear layers without bias whose rows do not depend on the number of rows.

`F.linear` picks another algorithm, and so another order of summation, for every row count. Two answers:

- `PackedLinear` (CPU): oneDNN with weights laid out in advance. From two rows on, its rows agree bit for bit at every
  count (checked on this machine for every shape when a model is built), and it reads weights at memory speed where
  `F.linear` reaches a third of it. A processor without instructions for 16-bit products takes the same weights in
  float32: twice the memory, and a sixth to a tenth of the time that `F.linear` takes there.
- `BlockLinear` (CUDA, and builds without the above): `F.linear` on blocks of one fixed row count. A tensor-core
  tile treats its rows alike; float32 products on a GPU do not, so there, as on the CPU, a block is one row.

Both take and return float32; the weights' dtype is that of the product. A pass of many rows that never needs to agree
with a smaller one (prefill) uses `bulk`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import groupby
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.kernels.quantise import Quantised, Weight, dense_of, in_halves, merge, on_rows, quantise
from surefoot.kernels.rows import CUDA_ROWS, MIN_ROWS

SINGLE = 1  # exact by construction
PACKED_ROWS = 4  # oneDNN reads packed weights up to a third faster for four rows than for two
PROBE_ROWS = (2, 3, 4, 5, 7, 8, 9, 16, 17)


class Linear(Protocol):
    """y = x W^T for x [n, in] float32, n >= 2, giving [n, out] float32; row i depends on x[i] alone."""

    def __call__(self, x: Tensor) -> Tensor:
        """Rows that do not depend on n."""

    def bulk(self, x: Tensor) -> Tensor:
        """The same product for many rows, without the promise."""

    def rows(self, outputs: Tensor) -> Weight:
        """The weight's rows of the outputs int64 [M], for a layer of these alone."""


class PackedLinear:
    """oneDNN's inner product on a weight [out, in] reordered in advance, in memory as `held`.
    Inputs and outputs are rounded to the weight's dtype either way, as its own product rounds them."""

    def __init__(self, weight: Tensor, held: torch.dtype) -> None:
        self._dtype, self.held = weight.dtype, held
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(held))
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, in] float32, n >= 2 -> [n, out] float32."""
        out: Tensor = self._product(x.to(self._dtype).to(self.held), self._packed, None, "none", [], "")
        return out.to(self._dtype).float()

    bulk = __call__

    def rows(self, outputs: Tensor) -> Tensor:
        """Read back from the packed weight."""
        weight: Tensor = self._packed.to_dense()
        return weight[outputs].to(self._dtype)


class BlockLinear:
    """`F.linear` on blocks of `block` rows, the last one padded with zeros. A weight of 8 bits is turned into
    one of the model's type at every call."""

    def __init__(self, weight: Weight, block: int) -> None:
        self.weight = weight
        self._block = block

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, in] float32 -> [n, out] float32."""
        rows = x.shape[0]
        weight = dense_of(self.weight)
        x = F.pad(x.to(weight.dtype), (0, 0, 0, -rows % self._block))
        # Each block in memory of its own: a library may choose its kernel by the alignment of what it is given.
        parts = [F.linear(part.clone(), weight) for part in x.split(self._block)]
        return torch.cat(parts)[:rows].float() if len(parts) > 1 else parts[0][:rows].float()

    def bulk(self, x: Tensor) -> Tensor:
        """One library product."""
        return F.linear(x.to(self.weight.dtype), dense_of(self.weight)).float()

    def rows(self, outputs: Tensor) -> Weight:
        """Gathered."""
        return on_rows(lambda weight: weight[outputs], self.weight)


class Beside:
    """Several layers on one input, their outputs side by side: weights of different kinds that are not made one."""

    def __init__(self, parts: Seq[Linear]) -> None:
        self.parts = tuple(parts)

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, in] float32, n >= 2 -> [n, out] float32."""
        return torch.cat([part(x) for part in self.parts], dim=-1)

    def bulk(self, x: Tensor) -> Tensor:
        """The library's products."""
        return torch.cat([part.bulk(x) for part in self.parts], dim=-1)

    def rows(self, outputs: Tensor) -> Weight:
        """Gathered from the weights as one, plain if they are of two kinds."""
        return on_rows(lambda *weights: torch.cat(weights)[outputs], *weights_of(self))


def weights_of(layer: Linear) -> tuple[Weight, ...]:
    """The layer's weights, as they are in memory: one, or those of the layers that are beside one another."""
    if isinstance(layer, Beside):
        return tuple(weight_of(part) for part in layer.parts)
    return (weight_of(layer),)


def weight_of(layer: Linear) -> Weight:
    """The layer's one weight."""
    assert isinstance(layer, BlockLinear), "a GPU reads weights that are not packed"
    return layer.weight


class LinearFactory:
    """Builds the linear layers of one model, remembering which shapes pack exactly on this machine. Without `pack` the
    weights stay as they are, for kernels that read them as they are; with `quantise` they are cut to 8 bits first."""

    def __init__(self, pack: bool = True, quantise: bool = False) -> None:
        assert not (pack and quantise), "packed weights keep their type"
        self._pack, self._quantise = pack, quantise
        self._packs: dict[tuple[int, int], bool] = {}

    @property
    def least_rows(self) -> int:
        """How many rows a CPU pass through the layers built so far carries at least to be fast."""
        return PACKED_ROWS if self._packs and all(self._packs.values()) else MIN_ROWS

    def keeps(self, device: torch.device) -> bool:
        """Whether the layers of weights on the device read these as they are, where they are."""
        return device.type == "cuda" or not self._pack

    def __call__(self, *weights: Weight) -> Linear:
        """One linear layer over the rows of all `weights` [out_i, in], in order: projections that read one input
        are one product. Where only some are in 8 bits it is computed with plain ones."""
        weight = merge([self.cut(weight) for weight in weights])
        return self.whole(weight) if isinstance(weight, Tensor) else _in_blocks(in_halves(weight))

    def beside(self, *weights: Weight) -> Linear:
        """The same, but in as many layers as it takes to leave every weight as it is: a checkpoint in 8 bits keeps the
        few rows of the decay whole, and the many beside them should not be read at twice their size for that."""
        kinds = groupby(map(self.cut, weights), lambda weight: isinstance(weight, Quantised))
        parts = [self(*run) for _, run in kinds]
        return parts[0] if len(parts) == 1 else Beside(parts)

    def cut(self, weight: Weight) -> Weight:
        """The weight [..., out, in] in as many bits as the layers' weights have."""
        return quantise(weight) if self._quantise and isinstance(weight, Tensor) else weight

    def whole(self, weight: Tensor) -> Linear:
        """One linear layer whose weight keeps its type."""
        packed = try_pack(weight) if not self.keeps(weight.device) else None
        if packed is None:
            return _in_blocks(weight)
        shape = (weight.shape[0], weight.shape[1])
        if shape not in self._packs:
            self._packs[shape] = rows_agree(packed, weight.shape[1])
        return packed if self._packs[shape] else _in_blocks(weight)


def _in_blocks(weight: Weight) -> BlockLinear:
    half_on_gpu = weight.is_cuda and weight.dtype != torch.float32
    return BlockLinear(weight, CUDA_ROWS if half_on_gpu else SINGLE)


def try_pack(weight: Tensor) -> PackedLinear | None:
    """The packed layer, in float32 where this processor has no such product for the weight's dtype; None where this
    build has none at all."""
    if not torch.backends.mkldnn.is_available():
        return None
    # The few processors that have one for float16 are not worth a third kind of result.
    for held in dict.fromkeys((torch.float32 if weight.dtype == torch.float16 else weight.dtype, torch.float32)):
        try:
            packed = PackedLinear(weight, held)
            packed(weight.new_zeros(MIN_ROWS, weight.shape[1], dtype=torch.float32))
        except RuntimeError:
            continue
        return packed
    return None


def rows_agree(linear: Linear, in_features: int, counts: tuple[int, ...] = PROBE_ROWS) -> bool:
    """Whether rows of random input have the same bits at every count. The order of summation does not depend on the
    values, so a disagreement would show in some element with near certainty."""
    generator = torch.Generator().manual_seed(in_features)
    x = torch.randn(max(counts), in_features, generator=generator)
    pairs = torch.cat([linear(part) for part in x[: max(counts) // MIN_ROWS * MIN_ROWS].split(MIN_ROWS)])
    return all(torch.equal(linear(x[:n])[: len(pairs)], pairs[:n]) for n in counts)
