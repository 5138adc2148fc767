"""How many passes an edit takes with drafters that copy: a replay of edited texts, without a model.

    python benchmarks/edits.py [--model surefoot-demo] [--lengths 4 8] [--own 96]

The prompt is a held-out text, the output that text with edits made by rule; a step keeps a draft as far as the edited
text goes along with it. Tokens per pass, over all texts. Then what a suffix automaton of these texts takes. With
`--own N` also what the model writes behind the built-in prompts, N tokens each, and how drafts behind near misses fare.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.report import table
from surefoot import Engine
from surefoot.bench.prompts import held_out, kinds
from surefoot.drafters.ngram import Match, NgramDrafter
from surefoot.drafters.suffix import SuffixAutomaton, SuffixDrafter
from surefoot.loading.checkpoint import find_model
from surefoot.loading.tokenizer import Tokenizer, require_tokenizer
from surefoot.sampling import SamplingParams
from surefoot.sequence import Sequence
from surefoot.types import Drafter

EVERY = 12  # words from one edit to the next
WORDS = re.compile(r"\w+")
OTHERS = ("river", "node", "seven", "window", "first", "paper", "result", "green")  # put in the place of words


def renamed(text: str) -> str:
    """The word of five letters or more that occurs most often has another name."""
    words = [word for word in WORDS.findall(text) if len(word) >= 5]
    name = max(sorted(set(words)), key=words.count)
    return re.sub(rf"\b{name}\b", "renamed_" + name[::-1], text)


def edited(text: str, edit: Callable[[str, str], str]) -> str:
    """Every twelfth word is what `edit` makes of it and another one."""
    places = list(WORDS.finditer(text))[EVERY - 1 :: EVERY]
    for number, found in reversed(list(enumerate(places))):
        text = text[: found.start()] + edit(found.group(), OTHERS[number % len(OTHERS)]) + text[found.end() :]
    return text


EDITS: dict[str, Callable[[str], str]] = {
    "renamed": renamed,
    "replaced": lambda text: edited(text, lambda word, other: other),
    "left out": lambda text: edited(text, lambda word, other: ""),
    "put in": lambda text: edited(text, lambda word, other: f"{other} {word}"),
    "unchanged": lambda text: text,
}


def passes(drafter: Drafter, prompt: list[int], output: list[int], depth: int) -> int:
    """Steps that it takes to put the output out."""
    sequence = Sequence(0, list(prompt), SamplingParams(), len(prompt) + len(output))
    drafter.observe(sequence, 0, None)
    steps = 0
    while sequence.room > 0:
        (draft,) = drafter.propose([sequence], [min(depth, sequence.room - 1)])
        left = output[len(sequence.output) :]
        kept = next((i for i, token in enumerate(draft.tokens) if token != left[i]), len(draft.tokens))
        if isinstance(drafter, Watched) and drafter.near:
            drafter.fared.append((len(draft.tokens), kept))
        position = len(sequence.tokens) - 1
        sequence.extend(left[: kept + 1])
        drafter.observe(sequence, position, None)
        steps += 1
    return steps


class Watched(NgramDrafter):
    """Notes which drafts are behind a near miss: `fared` has their lengths, and how many of their tokens were kept."""

    def __init__(self) -> None:
        super().__init__()
        self._without = NgramDrafter(reanchor=False)
        self.near = False
        self.fared: list[tuple[int, int]] = []

    def find(self, sequence: Sequence) -> Match | None:
        """As ever; it is a near miss if nothing would be found otherwise."""
        found = super().find(sequence)
        self.near = found is not None and self._without.find(sequence) is None
        return found


Pairs = list[tuple[list[int], list[int]]]  # prompts and outputs


def edits_of(tokenizer: Tokenizer) -> dict[str, Pairs]:
    """The held-out texts and what becomes of them, by kind of edit."""
    heading = tokenizer.encode("\n\n# Edited:\n\n")
    texts = [line["text"] for line in held_out()]
    return {
        name: [([*tokenizer.encode(text), *heading], tokenizer.encode(edit(text))) for text in texts]
        for name, edit in EDITS.items()
    }


def own_texts(model: str, count: int) -> Pairs:
    """What the model writes behind the built-in prompts, greedily."""
    engine = Engine.from_pretrained(model, drafter="none", draft_length=0, dtype="bfloat16")
    encode = require_tokenizer(engine.tokenizer, "built-in prompts").encode
    prompts = [encode(text) for texts in kinds().values() for text in texts]
    params = SamplingParams(max_new_tokens=count, ignore_eos=True)
    return [(prompt, engine.generate(prompt, params).token_ids) for prompt in prompts]


def automaton_of(tokens: list[int]) -> SuffixAutomaton:
    """Of one text."""
    automaton = SuffixAutomaton()
    for token in tokens:
        automaton.add(token)
    return automaton


def main() -> None:
    """Print one table, as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="surefoot-demo")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--own", type=int, default=0, metavar="N", help="tokens of the model's own behind each prompt")
    args = parser.parse_args()
    tokenizer = require_tokenizer(Tokenizer.from_folder(find_model(args.model)), "edits of text")
    makers: dict[str, Callable[[], Drafter]] = {
        "ngram": lambda: NgramDrafter(reanchor=False),
        "ngram, re-anchored": NgramDrafter,
        "suffix": SuffixDrafter,
    }
    columns = edits_of(tokenizer)
    if args.own:
        columns["own"] = own_texts(args.model, args.own)
    rows = []
    for depth in args.lengths:
        for name, make in makers.items():
            row = [f"{name}, K = {depth}"]
            for pairs in columns.values():
                steps = sum(passes(make(), prompt, output, depth) for prompt, output in pairs)
                row.append(f"{sum(len(output) for _, output in pairs) / steps:.2f}")
            rows.append(row)
    print(table(["", *columns], rows))
    for depth in args.lengths if args.own else ():
        watched = Watched()
        for prompt, output in columns["own"]:
            passes(watched, prompt, output, depth)
        begun, whole = (sum(test) for test in zip(*((n > 0, n == k) for k, n in watched.fared), strict=True))
        print(f"\nown, K = {depth}: of {len(watched.fared)} drafts behind a near miss {begun} began rightly, "
              f"{whole} were kept whole")  # fmt: skip
    text = [token for line in held_out() for token in tokenizer.encode(line["text"])]
    start = time.perf_counter()
    states = automaton_of(text).states
    seconds = time.perf_counter() - start
    tracemalloc.start()
    held = automaton_of(text)
    size, _ = tracemalloc.get_traced_memory()
    print(f"\nautomaton of {held.size} tokens: {states} states, {size / held.size:.0f} bytes and "
          f"{1e6 * seconds / held.size:.1f} us a token")  # fmt: skip


if __name__ == "__main__":
    main()
