"""The LM head's rows of a few tokens: what a drafter chooses among, when reading all of the head costs more than it
gives.

Source: the frequency-ranked draft vocabulary of FR-Spec (Zhao et al. 2025, arXiv 2502.14856).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from surefoot.model.decoder import Decoder


class DraftHead:
    """The LM head for N tokens; its rows are copied once. `ids` int64 [N], ascending (so that ties go to the lowest id,
    as in the whole vocabulary), on the model's device; `linear` gives their logits [n, N]."""

    def __init__(self, decoder: Decoder, ids: Seq[int]) -> None:
        self.ids = torch.tensor(sorted(ids), device=decoder.device)
        self.linear = decoder.linear(decoder.head.rows(self.ids))
        self._vocab_size = decoder.config.vocab_size

    def logits(self, hidden: Tensor) -> Tensor:
        """Post-norm hidden [n, H], n >= 2 -> [n, V] float32, -inf for all other tokens; rows do not depend on n."""
        whole = hidden.new_full((hidden.shape[0], self._vocab_size), -math.inf)
        return whole.index_copy_(1, self.ids, self.linear(hidden))
