"""Drafts whose acceptance is set: to measure speed where a drafter's own drafts mean nothing, as with random weights.

A step draws one number; the draft agrees with the known continuation at the places whose share is above it, and at no
other. So the draft token at place j is accepted in shares[j] of the steps, whatever the model is.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from surefoot.verify.philox import Purpose, uniforms

SEED = 0


def synthetic_draft(known: Seq[int], shares: Seq[float], slot: int, position: int, vocab_size: int) -> list[int]:
    """As many draft tokens as `known` has: those that stand at `position` and behind it in the text that plain decoding
    gives. At place j it is the known token if the step's number, keyed by slot and position, is below shares[j], else
    the next id. `shares` do not rise."""
    (number,) = uniforms(SEED, [position], Purpose.DRAFT, start=slot).tolist()
    return [token if number < share else (token + 1) % vocab_size for token, share in zip(known, shares, strict=False)]
