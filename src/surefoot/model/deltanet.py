"""The Gated DeltaNet mixer: projections, short convolution, gated delta rule, gated norm."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.cache import RecurrentCache
from surefoot.config import ModelConfig
from surefoot.kernels import gated_delta
from surefoot.kernels.causal_conv import causal_conv
from surefoot.kernels.linear import Linear, LinearFactory
from surefoot.kernels.norm import GatedRMSNorm, L2Norm
from surefoot.kernels.quantise import on_rows
from surefoot.kernels.rows import by_row, lane_multiple
from surefoot.model.spans import Layout
from surefoot.model.tensors import Weights, whole


class PrefillState(Protocol):
    """What prefill needs of a layer's cache; see `cache.recurrent.RecurrentCache`."""

    def conv_past(self, slot: int) -> Tensor:
        """The last conv_width - 1 inputs."""

    def set_past(self, slot: int, rows: Tensor) -> None:
        """Replace them."""

    def read_state(self, slot: int) -> Tensor:
        """The recurrent state."""

    def write_state(self, slot: int, state: Tensor) -> None:
        """Replace it."""


class DeltaNet:
    """One linear-attention mixer; its weights are `prefix + in_proj_*, conv1d, A_log, dt_bias, norm, out_proj`."""

    def __init__(self, config: ModelConfig, tensors: Weights, prefix: str, linear: LinearFactory) -> None:
        self.config = c = config
        self.lanes = self.lanes_of(c)  # beta and decay logits, padded to whole vectors
        qkv, z = (tensors[prefix + f"in_proj_{n}.weight"] for n in ("qkv", "z"))
        b, a = (whole(tensors, prefix + f"in_proj_{n}.weight") for n in "ba")
        filler = b.new_zeros(self.lanes - b.shape[0], c.hidden_size)
        self.in_proj: Linear = linear.beside(on_rows(self._by_head, qkv), z, b, filler, a, filler)
        self.out_proj: Linear = linear(tensors[prefix + "out_proj.weight"])
        taps = self._by_head(whole(tensors, prefix + "conv1d.weight").float().view(c.conv_channels, c.conv_width))
        self.taps = taps.T.contiguous().unsqueeze(1)  # [width, 1, C]
        self._unit = L2Norm(b.device)
        # Queries are not scaled by Dk^-0.5: the norm takes any scale out of what they read, but for its eps.
        self.norm = GatedRMSNorm(whole(tensors, prefix + "norm.weight"), c.norm_eps * c.linear_key_dim)
        self._columns = torch.arange(c.linear_value_heads, device=b.device).repeat_interleave(c.linear_value_dim)
        padding = (0, self.lanes - c.linear_value_heads)
        self.dt_bias = F.pad(whole(tensors, prefix + "dt_bias").float(), padding)
        self.rate = F.pad(whole(tensors, prefix + "A_log").float().exp().neg(), padding)

    def decode(self, x: Tensor, cache: RecurrentCache, layout: Layout) -> Tensor:
        """x [rows, H] float32, normalised -> [rows, H]. Leaves every span's window open in the cache."""
        u, z, b, a = self._project(self.in_proj(x))
        strips = [cache.open_strip(span.slot, u[rows]) for span, rows in layout.shares()]
        mixed = layout.join([causal_conv(strip, self.taps) for strip in strips])
        key, query, value = self._heads(by_row(F.silu, mixed))
        # One number per value head becomes one per column of its state.
        decay, beta = (
            gate.index_select(1, self._columns).view(value.shape)
            for gate in (by_row(torch.exp, self._log_decay(a)), by_row(torch.sigmoid, b))
        )
        out = torch.zeros_like(value)  # of padding, too
        by_token = [part.unbind() for part in (query, key, value, decay, beta, out)]  # faster than one by one
        for span in layout.spans:
            q, k, v, fade, weight, read = (rows[span.rows] for rows in by_token)
            state, ahead = cache.state[span.slot], cache.ahead[span.slot]
            cache.open_window(span.slot, gated_delta.window(q, k, v, fade, weight, state, ahead, read))
        return self.out_proj(self.norm(out.view(x.shape[0], -1), z))

    def prefill(self, x: Tensor, cache: PrefillState, slot: int) -> Tensor:
        """x [T, H]: consecutive tokens of one sequence, read for good."""
        c, tokens = self.config, x.shape[0]
        u, z, b, a = self._project(self.in_proj.bulk(x))
        strip = torch.cat([cache.conv_past(slot), u])
        key, query, value = self._heads(F.silu(causal_conv(strip, self.taps)))
        heads = c.linear_value_heads
        out, state = gated_delta.chunk(
            query.squeeze(2), key.squeeze(2), value.view(tokens, heads, -1),
            self._log_decay(a)[:, :heads], b[:, :heads].sigmoid(), cache.read_state(slot),
        )  # fmt: skip
        cache.write_state(slot, state)
        cache.set_past(slot, strip[-(c.conv_width - 1) :])
        return self.out_proj.bulk(self.norm(out.flatten(1), z))

    @staticmethod
    def lanes_of(config: ModelConfig) -> int:
        """Columns of the merged projection for beta's logits, and as many for the decay's."""
        return lane_multiple(config.linear_value_heads)

    def _by_head(self, channels: Tensor) -> Tensor:
        """Convolution channels [C, ...] from all queries, all keys, all values to (key, query) of each key head, then
        all values: what belongs to a head's state update then lies together."""
        c = self.config
        query, key, value = channels.split([c.key_width, c.key_width, c.value_width])
        pairs = torch.stack([x.view(c.linear_key_heads, c.linear_key_dim, -1) for x in (key, query)], dim=1)
        return torch.cat([pairs.flatten(0, 2), value])

    def _project(self, merged: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        c = self.config
        widths = (c.conv_channels, c.value_width, self.lanes, self.lanes)
        u, z, b, a = merged.split_with_sizes(widths, dim=-1)  # half the time of `split`
        return u, z, b, a

    def _log_decay(self, a: Tensor) -> Tensor:
        """g = -exp(A_log) softplus(a + dt_bias), never positive: [n, lanes]."""
        return by_row(F.softplus, a + self.dt_bias).mul_(self.rate)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The convolution's output [n, C] -> unit keys and queries [n, Hk, 1, Dk], values [n, Hk, 1, r * Dv]."""
        c, rows = self.config, mixed.shape[0]
        pairs, value = mixed.split_with_sizes((2 * c.key_width, c.value_width), dim=-1)
        units = self._unit(pairs.view(rows, c.linear_key_heads, 2, c.linear_key_dim))
        key, query = units.split_with_sizes((1, 1), dim=2)
        return key, query, value.view(rows, c.linear_key_heads, 1, -1)
