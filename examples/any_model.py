"""Speculative decoding for a model that is nothing but a function: no checkpoint, no cache.

`forward(token_ids, position)` returns the logits after each of the tokens it is given. When `position` is one it has
read before, what it read from there on was a refused draft and has to go.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot import SamplingParams, speculate

TEXT = "she sells sea shells by the sea shore. the shells she sells are sea shells, i am sure. "
LETTERS = sorted(set(TEXT))


class Letters:
    """Predicts a letter from the three before it, as often as it followed them in TEXT."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.calls = 0

    def forward(self, token_ids: list[int], position: int) -> Tensor:
        """Logits [n, V] after each token."""
        self.calls += 1
        self.read[position:] = token_ids
        return torch.stack([self.row(self.read[: position + i + 1]) for i in range(len(token_ids))])

    def row(self, context: list[int]) -> Tensor:
        """Log-counts of what comes after the context's last three letters, [V]."""
        last = "".join(LETTERS[token] for token in context[-3:])
        counts = torch.full((len(LETTERS),), 0.01)
        for start in range(len(TEXT) - len(last)):
            if TEXT.startswith(last, start):
                counts[LETTERS.index(TEXT[start + len(last)])] += 1
        return counts.log()


def main() -> None:
    """Decode 120 letters with n-gram drafts and plainly, at temperature 0.7 and with one seed."""
    prompt = [LETTERS.index(letter) for letter in TEXT]
    params = SamplingParams(max_new_tokens=120, temperature=0.7, seed=3)
    drafted, plain = Letters(), Letters()
    out = speculate(drafted.forward, prompt, params, drafter="ngram", draft_length=8)
    assert speculate(plain.forward, prompt, params, drafter="none").token_ids == out.token_ids
    print("".join(LETTERS[token] for token in out.token_ids))
    print(f"same letters from {drafted.calls} calls of the function as from {plain.calls}")


if __name__ == "__main__":
    main()
