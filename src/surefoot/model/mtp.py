"""The checkpoint's multi-token-prediction head: one decoder layer on the target's own hidden state.

The row of position p joins the target's post-norm hidden state there with the embedding of the token at p + 1 and
predicts the token at p + 2. What follows the head's own norm is chained: it stands in for the target's hidden state of
the next position. Embedding and LM head are the target's. The wiring, and how it was settled: docs/how-it-works.md.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from surefoot.cache import KVCache
from surefoot.errors import CheckpointError
from surefoot.kernels.norm import RMSNorm
from surefoot.model.block import Block
from surefoot.model.decoder import Decoder, build_kv
from surefoot.model.spans import Layout
from surefoot.model.tensors import Weights, let_go, whole


class MTPHead:
    """The module; it has no policy and keeps no state.

    Raises CheckpointError for a head of more than one layer: which layer serves which draft step, and what fills the
    further layers' lanes, is not known for any published checkpoint.
    """

    def __init__(self, decoder: Decoder, tensors: Weights) -> None:
        self.config = decoder.config
        if self.config.mtp_layers != 1:
            raise CheckpointError(f"MTP head: expected one layer, found {self.config.mtp_layers}")
        self.decoder = decoder
        self.fc = decoder.linear(tensors["mtp.fc.weight"])
        self.embedding_norm, self.hidden_norm, self.norm = (
            RMSNorm(1 + whole(tensors, f"mtp.{n}.weight").float(), self.config.norm_eps)
            for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        )
        self.block = Block(self.config, tensors, "mtp.layers.0.", "full_attention", decoder.linear)
        let_go(tensors, "mtp.")

    def build_lane(self, slots: int) -> KVCache:
        """An empty lane as long as the decoder's context."""
        return build_kv(self.config, slots, self.decoder.max_len, self.decoder.dtype, self.decoder.device)

    def decode(self, hidden: Tensor, tokens: Seq[int], lane: KVCache, layout: Layout) -> Tensor:
        """hidden [n, H] at the spans' positions and the n tokens that follow them -> the head's post-norm hidden
        [rows, H], padding included. Writes the lane at the spans' positions."""
        hidden = torch.nn.functional.pad(hidden, (0, 0, 0, layout.rows - hidden.shape[0]))
        x = self.fc(self._inputs(hidden, self.decoder.embed_padded(tokens, layout.rows)))
        rope = self.decoder.rope.at(layout.positions(self.decoder.device))
        return self.norm(self.block.decode(x, rope, lane, layout))

    def prefill(self, hidden: Tensor, tokens: Seq[int], lane: KVCache, slot: int, position: int) -> Tensor:
        """The same for T consecutive positions of one sequence, the first of which is `position`: [T, H]."""
        device = self.decoder.device
        x = self.fc.bulk(self._inputs(hidden, self.decoder.embed(torch.tensor(tokens, device=device))))
        self.decoder.read([self.block], [lane], x, slot, position)
        return self.norm(x)

    def _inputs(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """The two normed halves side by side, embedding first."""
        return torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], dim=-1)
