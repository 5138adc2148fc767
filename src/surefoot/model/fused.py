"""The decode pass as fused kernels: five a layer (six with experts), over memory that stays where it is.

The weights are those of the plain model (`Decoder`, `MTPHead`), which goes on to read prompts; here its layers are only
arranged for windows of few tokens. Nothing in a pass depends on a number that the host holds, so it can be recorded.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from surefoot.cache.device import DeltaSlots, PrefillCache, Progress
from surefoot.cache.kv import KVCache
from surefoot.config import ModelConfig
from surefoot.kernels.fused.attention import attend, workspaces
from surefoot.kernels.fused.delta import DeltaState, DeltaWeights, delta_window
from surefoot.kernels.fused.linear import MAX_PARTS, SPLIT_FEATURES, Feed, Workspace, linear, tiling_of
from surefoot.kernels.fused.moe import feed_parts, moe, moe_workspace
from surefoot.kernels.fused.rows import Text, embed, final_norm, head_inputs
from surefoot.kernels.linear import weight_of, weights_of
from surefoot.kernels.norm import RMSNorm
from surefoot.kernels.quantise import Weight
from surefoot.model.attention import Attention
from surefoot.model.block import Block
from surefoot.model.decoder import Decoder, build_kv
from surefoot.model.deltanet import DeltaNet
from surefoot.model.draft_head import DraftHead
from surefoot.model.ffn import FeedForward, MoE, SwiGLU
from surefoot.model.mtp import MTPHead

EMBED_BLOCK = 128  # columns of the stream that share a sum of squares behind the embedding


class Scratch:
    """Memory that the layers of a pass take turns to use, for at most `rows` rows."""

    def __init__(self, decoder: Decoder, rows: int) -> None:
        c, device, dtype = decoder.config, decoder.device, decoder.dtype
        self.rows = rows
        attention = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        delta = c.conv_channels + c.value_width + 2 * DeltaNet.lanes_of(c)
        mixed = max(c.num_heads * c.head_dim, c.value_width)
        self._flat = {
            name: torch.empty(rows * columns, dtype=kind, device=device)
            for name, columns, kind in (
                ("merged", max(attention, delta), dtype),
                ("mixed", mixed, dtype),
                ("act", c.ffn_width or 1, dtype),
                ("stream", c.hidden_size, torch.float32),
                ("pair", 2 * c.hidden_size, dtype),
                ("scaled", c.hidden_size, dtype),
                ("narrow", c.hidden_size, dtype),
                ("squares", c.hidden_size, torch.float32),
                ("logits", c.vocab_size, torch.float32),
            )
        }
        self.sums = Workspace.allocate(rows, SPLIT_FEATURES, MAX_PARTS, device)
        self.experts = None
        if c.moe is not None:
            m, inner = c.moe, max(c.moe.expert_width, c.moe.shared_width)
            self.experts = moe_workspace(rows, c.hidden_size, m.num_experts, inner, m.experts_per_token, dtype, device)
        self.splits = workspaces(rows, c.num_heads, c.head_dim, decoder.max_len, device)

    def feed(self, rows: int, columns: int, parts: int) -> Feed:
        """The residual stream's companion, for a layer of so many blocks."""
        return Feed(self.take("scaled", rows, columns), self.take("squares", rows, parts))

    def take(self, name: str, rows: int, columns: int) -> Tensor:
        """[rows, columns] of the buffer `name`."""
        return self._flat[name][: rows * columns].view(rows, columns)


class FusedMixer(Protocol):
    """merged projection -> what the output projection reads."""

    def __call__(self, merged: Tensor, out: Tensor, slots: Tensor, start: Tensor, window: int) -> None:
        """Rows of a window, at start[slot] + i."""


class FusedAttention:
    """`kernels.fused.attention` with one layer's weights and cache."""

    def __init__(self, layer: Attention, decoder: Decoder, cache: KVCache, scratch: Scratch) -> None:
        self._scales = layer.q_scale, layer.k_scale
        self._rope = decoder.rope.cos.squeeze(1), decoder.rope.sin.squeeze(1)
        self._cache, self._scratch, self._eps = cache, scratch, decoder.config.norm_eps

    def __call__(self, merged: Tensor, out: Tensor, slots: Tensor, start: Tensor, window: int) -> None:
        """Window rows stand at start[slot] + i; their keys and values enter the cache."""
        attend(merged, *self._scales, *self._rope, self._cache.keys, self._cache.values, slots, start, out,
               *self._scratch.splits, window=window, eps=self._eps)  # fmt: skip


class FusedDelta:
    """`kernels.fused.delta` with one layer's weights and state."""

    def __init__(self, layer: DeltaNet, state: DeltaState, replay: Tensor) -> None:
        heads = state.deltas.shape[1]
        self._weights = DeltaWeights(
            layer.taps.squeeze(1), layer.rate[:heads].contiguous(), layer.dt_bias[:heads].contiguous(),
            layer.norm.scale, layer.norm.eps, layer.lanes,
        )  # fmt: skip
        self._state, self._replay = state, replay

    def __call__(self, merged: Tensor, out: Tensor, slots: Tensor, start: Tensor, window: int) -> None:
        """The last window's kept tokens are applied, then the new window is run."""
        delta_window(merged, self._weights, self._state, slots, start, self._replay, out, window=window)


Ahead = tuple[Tensor, Feed]  # the scale of the norm that reads the stream next, and what is to be prepared for it


class FusedFeedForward(Protocol):
    """x += ffn(norm(x))."""

    parts: int
    """How many sums of squares of a row it leaves in a `Feed`."""

    def asks(self, rows: int, parts: int) -> Ahead | None:
        """What the sum into x before it, of so many parts, has to prepare; None if nothing."""

    def __call__(self, x: Tensor, fed: Ahead | None, ahead: Ahead | None) -> None:
        """x [R, H] in place; `fed` is what it asked for."""


class FusedSwiGLU:
    """Two linear layers, the first on what the sum before it prepared."""

    def __init__(self, layer: SwiGLU, norm: RMSNorm, scratch: Scratch) -> None:
        self._norm, self._scratch = norm, scratch
        self._gate_up, self._down = weight_of(layer.gate_up), weight_of(layer.down)
        self.parts = parts_of(self._down)

    def asks(self, rows: int, parts: int) -> Ahead | None:
        """The norm before gate and up."""
        return self._norm.scale, self._scratch.feed(rows, self._gate_up.shape[1], parts)

    def __call__(self, x: Tensor, fed: Ahead | None, ahead: Ahead | None) -> None:
        """x [R, H] in place."""
        assert fed is not None
        sums, (_, feed) = self._scratch.sums, fed
        act = self._scratch.take("act", x.shape[0], self._down.shape[1])
        linear(feed.scaled, self._gate_up, act, sums, squares=feed.squares, eps=self._norm.eps, epilogue="swiglu")
        linear(act, self._down, x, sums, epilogue="add", feed=ahead)


class FusedMoE:
    """`kernels.fused.moe` with one layer's weights; its norm is its own."""

    def __init__(self, layer: MoE, norm: RMSNorm, scratch: Scratch) -> None:
        assert layer.packed is not None
        assert scratch.experts is not None
        self._weights, self._space = layer.packed, scratch.experts
        self._top, self._norm = layer.top, norm
        self.parts = feed_parts(layer.packed.router.shape[1])

    def asks(self, rows: int, parts: int) -> Ahead | None:
        """Nothing: routing needs whole normed rows."""
        return None

    def __call__(self, x: Tensor, fed: Ahead | None, ahead: Ahead | None) -> None:
        """x [R, H] in place."""
        w = self._weights
        moe(x, self._norm.scale, w.router, w.gate_up, w.down, self._space, top_k=self._top, eps=self._norm.eps,
            feed=ahead)  # fmt: skip


def fuse_ffn(layer: FeedForward, norm: RMSNorm, scratch: Scratch) -> FusedFeedForward:
    """The layer's fused counterpart."""
    return FusedSwiGLU(layer, norm, scratch) if isinstance(layer, SwiGLU) else FusedMoE(layer, norm, scratch)


class FusedBlock:
    """x + mixer(norm(x)), then x + ffn(norm(x)), x in place. Every sum into x prepares the norm that reads it next, the
    last one that of the block behind this one (`then`, if any)."""

    def __init__(self, block: Block, mixer: FusedMixer, scratch: Scratch, then: Block | None) -> None:
        self._mixer, self._scratch = mixer, scratch
        self._in, self._out = weights_of(block.mixer.in_proj), weight_of(block.mixer.out_proj)
        self._merged = sum(weight.shape[0] for weight in self._in)
        self._ffn = fuse_ffn(block.ffn, block.ffn_norm, scratch)
        self._next_norm = None if then is None else then.mixer_norm.scale
        self._eps = block.mixer_norm.eps

    def __call__(self, x: Tensor, fed: Feed, slots: Tensor, start: Tensor, window: int) -> Feed:
        """x [B * window, H] float32, prepared in `fed` for the first norm; what x is prepared in afterwards."""
        rows, scratch = x.shape[0], self._scratch
        merged = scratch.take("merged", rows, self._merged)
        mixed = scratch.take("mixed", rows, self._out.shape[1])
        column = 0
        for weight in self._in:
            part = merged[:, column : column + weight.shape[0]]
            linear(fed.scaled, weight, part, scratch.sums, squares=fed.squares, eps=self._eps, early=True)
            column += weight.shape[0]
        self._mixer(merged, mixed, slots, start, window)
        between = self._ffn.asks(rows, parts_of(self._out))
        linear(mixed, self._out, x, scratch.sums, epilogue="add", feed=between)
        after = scratch.feed(rows, x.shape[1], self._ffn.parts)
        self._ffn(x, between, None if self._next_norm is None else (self._next_norm, after))
        return after


class FusedModel:
    """Decoder and MTP head over one set of device caches.

    `slots` sequences; windows of at most `window` tokens. The caches' memory is shared with `prefill_cache`, through
    which the plain model reads prompts, and `lane`, the head's.
    """

    def __init__(self, decoder: Decoder, head: MTPHead | None, slots: int, window: int) -> None:
        c = decoder.config
        self.decoder, self.head, self.slots, self.window = decoder, head, slots, window
        self.progress = Progress.allocate(slots, decoder.max_len, window, c.hidden_size, decoder.device)
        self.scratch = Scratch(decoder, slots * window)
        layers: list[KVCache | DeltaSlots] = []
        self._blocks = []
        for index, block in enumerate(decoder.blocks):
            mixer: FusedMixer
            if isinstance(block.mixer, Attention):
                kv = build_kv(c, slots, decoder.max_len, decoder.dtype, decoder.device)
                layers.append(kv)
                mixer = FusedAttention(block.mixer, decoder, kv, self.scratch)
            else:
                state = _build_delta(c, slots, window, decoder)
                layers.append(DeltaSlots(state, c.conv_width))
                mixer = FusedDelta(block.mixer, state, self.progress.replay)
            then = decoder.blocks[index + 1] if index + 1 < len(decoder.blocks) else None
            self._blocks.append(FusedBlock(block, mixer, self.scratch, then))
        self.prefill_cache = PrefillCache(layers, slots, c.conv_width)
        self._lm_head = weight_of(decoder.head)
        if head is not None:
            self.lane = head.build_lane(slots)
            own = FusedAttention(_attention_of(head.block), decoder, self.lane, self.scratch)
            self._head_block = FusedBlock(head.block, own, self.scratch, None)
            self._chained = torch.zeros(slots, 1, c.hidden_size, device=decoder.device)

    def score(self, text: Text, window: int) -> Tensor:
        """Read the window of every sequence (its last emitted token and its drafts); logits [B * window, V] float32.
        The rows' post-norm hidden states stay in `progress.hidden`, at their positions' places."""
        rows = text.slots.shape[0] * window
        x = self.scratch.take("stream", rows, self.decoder.config.hidden_size)
        first = self.decoder.blocks[0].mixer_norm.scale
        feed = self.scratch.feed(rows, x.shape[1], -(-x.shape[1] // EMBED_BLOCK))
        embed(self.decoder.embedding, text, text.length, x, first, feed, window=window)
        for block in self._blocks:
            feed = block(x, feed, text.slots, text.length, window)
        narrow = self.scratch.take("narrow", rows, x.shape[1])
        norm = self.decoder.norm
        final_norm(x, norm.scale, text.slots, text.length, self.progress.hidden, narrow, window=window, eps=norm.eps)
        return self._logits(narrow, self._lm_head)

    def draft_first(self, text: Text, waiting: Tensor, window: int, draft_head: DraftHead | None = None) -> Tensor:
        """Take the target's hidden states that wait, `waiting` [S] of them and at most `window`, into the head's lane;
        the logits of the first draft token [B, V], or those of the draft head's tokens [B, N]."""
        x = self._take_in(text, self.progress.laned, self.progress.hidden, window)
        return self._draft(x, text, waiting, window, draft_head)

    def draft_next(self, text: Text, start: Tensor, draft_head: DraftHead | None = None) -> Tensor:
        """One more row of the head, at start[slot], from its own last hidden state; the logits of the next draft token
        [B, V], or [B, N]."""
        return self._draft(self._take_in(text, start, self._chained, 1), text, start, 1, draft_head)

    def fill_lane(self, text: Text) -> None:
        """Take up to a window of the target's hidden states that wait into the head's lane. Rows that do not wait yet
        leave nothing there that counts."""
        laned = self.progress.laned
        self._take_in(text, laned, self.progress.hidden, self.window)
        torch.add(laned, self.window, out=laned)
        torch.minimum(laned, text.length, out=laned)

    def _take_in(self, text: Text, start: Tensor, hidden: Tensor, window: int) -> Tensor:
        """The head's block over states [S, 2^n, H] at their positions from start[slot] on; the stream
        [B * window, H]."""
        assert self.head is not None
        head, rows, width = self.head, text.slots.shape[0] * window, self.decoder.config.hidden_size
        pair = self.scratch.take("pair", rows, 2 * width)
        x = self.scratch.take("stream", rows, width)
        norms = head.embedding_norm.scale, head.hidden_norm.scale
        head_inputs(self.decoder.embedding, text, start, hidden, norms, pair, window=window, eps=head.norm.eps)
        fc = weight_of(head.fc)
        feed = self.scratch.feed(rows, width, parts_of(fc))
        linear(pair, fc, x, self.scratch.sums, feed=(head.block.mixer_norm.scale, feed))
        self._head_block(x, feed, text.slots, start, window)
        return x

    def _draft(self, x: Tensor, text: Text, place: Tensor, window: int, draft_head: DraftHead | None) -> Tensor:
        """The logits behind the last of each sequence's first place[slot] rows of a stream; of windows of one row,
        which then is at the position place[slot], behind that."""
        assert self.head is not None
        norm = self.head.norm
        narrow = self.scratch.take("narrow", text.slots.shape[0], x.shape[1])
        final_norm(x, norm.scale, text.slots, place, self._chained, narrow, window=window, eps=norm.eps,
                   last=window > 1)  # fmt: skip
        return self._logits(narrow, self._lm_head if draft_head is None else weight_of(draft_head.linear))

    def _logits(self, hidden: Tensor, weight: Weight) -> Tensor:
        logits = self.scratch.take("logits", hidden.shape[0], weight.shape[0])
        linear(hidden, weight, logits, self.scratch.sums)
        return logits


def parts_of(weight: Weight) -> int:
    """Blocks of the outputs of a layer that adds to the residual stream."""
    return -(-weight.shape[0] // tiling_of(weight, paired=False).block_n)


def fits(config: ModelConfig) -> bool:
    """Whether the kernels take the shape: head widths are powers of two, the convolution has four taps."""
    widths = (config.head_dim, config.linear_key_dim, config.linear_value_dim)
    return config.conv_width == 4 and all(width >= 16 and width & (width - 1) == 0 for width in widths)


def _attention_of(block: Block) -> Attention:
    assert isinstance(block.mixer, Attention)
    return block.mixer


def _build_delta(c: ModelConfig, slots: int, window: int, decoder: Decoder) -> DeltaState:
    return DeltaState.allocate(
        slots, (c.linear_key_heads, c.linear_value_heads), (c.linear_key_dim, c.linear_value_dim),
        c.conv_channels, c.conv_width, window, decoder.dtype, decoder.device,
    )  # fmt: skip
