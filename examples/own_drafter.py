"""A drafter of one's own: for each token, remember the one that came after it most often.

Any object with a name and these three methods will do. It may be as wrong as it likes; only the speed suffers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence as Seq

from torch import Tensor

from surefoot import Engine, SamplingParams
from surefoot.sequence import Sequence
from surefoot.types import Draft


class BigramDrafter:
    """Drafts the most frequent follower of the last token, and so on from there. Learns from every sequence."""

    name = "bigram"

    def __init__(self) -> None:
        self.followers: dict[int, Counter[int]] = defaultdict(Counter)

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        """A draft of at most `depths[i]` tokens for `sequences[i]`; an empty one is fine."""
        drafts = []
        for sequence, depth in zip(sequences, depths, strict=True):
            tokens: list[int] = []
            while len(tokens) < depth and (seen := self.followers.get((tokens or sequence.tokens)[-1])):
                tokens.append(seen.most_common(1)[0][0])
            drafts.append(Draft(tuple(tokens), source=self.name))  # no probabilities: it was certain
        return drafts

    def observe(self, sequence: Sequence, position: int, hidden: Tensor | None) -> None:
        """The tokens from `position` on are settled. The prompt is the first thing that comes by here."""
        for before, after in zip(sequence.tokens[position:], sequence.tokens[position + 1 :], strict=False):
            self.followers[before][after] += 1

    def release(self, sequence: Sequence) -> None:
        """The sequence has ended; what was learnt from it may stay."""


def main() -> None:
    """Decode with the drafter and without, and compare."""
    prompt = "for row in rows:\n    for column in columns:\n        print(row, column)\n\nfor row in rows:\n"
    params = SamplingParams(max_new_tokens=64)
    ours = Engine.from_pretrained("surefoot-demo", drafter=BigramDrafter(), draft_length=2, max_len=1024)
    out = ours.generate(prompt, params)
    plain = Engine.from_pretrained("surefoot-demo", drafter="none", max_len=1024)
    assert plain.generate(prompt, params).token_ids == out.token_ids
    print(f"same tokens; {out.stats.accepted} of {out.stats.proposed} drafted tokens were kept")


if __name__ == "__main__":
    main()
