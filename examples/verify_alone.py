"""The p/q rule without an engine: whatever a drafter proposes, what comes out has the target's law."""

from __future__ import annotations

import torch

from surefoot import verify

TARGET = torch.tensor([0.5, 0.3, 0.15, 0.05])
DRAFT = torch.tensor([0.1, 0.2, 0.3, 0.4])  # a poor guess: nearly the reverse
ROUNDS = 4000


def main() -> None:
    """Draft one token and judge it, many times over; count the first token that comes out."""
    generator = torch.Generator().manual_seed(0)
    counts, kept = torch.zeros(4), 0
    for _ in range(ROUNDS):
        draft = torch.multinomial(DRAFT, 1, generator=generator)
        uniforms = torch.rand(2, generator=generator, dtype=torch.float64)
        verdict = verify.accept(draft, TARGET.expand(2, -1), DRAFT[None], uniforms)
        counts[draft[0] if verdict.accepted else verdict.token] += 1
        kept += verdict.accepted

    print("token   target   draft   came out")
    for token, (p, q, share) in enumerate(zip(TARGET, DRAFT, counts / ROUNDS, strict=True)):
        print(f"{token:5}   {p:6.3f}   {q:5.3f}   {share:8.3f}")
    overlap = torch.minimum(TARGET, DRAFT).sum()
    print(f"kept {kept / ROUNDS:.3f} of the drafts; theory says {overlap:.3f}, the overlap of the two")
    assert (counts / ROUNDS - TARGET).abs().max() < 0.04


if __name__ == "__main__":
    main()
