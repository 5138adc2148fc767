"""How many passes an edit takes with drafters that copy: a replay of edited texts, without a model.

    python benchmarks/edits.py [--model surefoot-demo] [--lengths 4 8]

The prompt is a held-out text, the output that text with edits made by rule; a step keeps a draft as far as the edited
text goes along with it. Tokens per pass, over all texts. Then what a suffix automaton of these texts takes.
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
from surefoot.bench.prompts import held_out
from surefoot.drafters.ngram import NgramDrafter
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
        position = len(sequence.tokens) - 1
        sequence.extend(left[: kept + 1])
        drafter.observe(sequence, position, None)
        steps += 1
    return steps


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
    args = parser.parse_args()
    tokenizer = require_tokenizer(Tokenizer.from_folder(find_model(args.model)), "edits of text")
    makers: dict[str, Callable[[], Drafter]] = {
        "ngram": lambda: NgramDrafter(reanchor=False),
        "ngram, re-anchored": NgramDrafter,
        "suffix": SuffixDrafter,
    }
    rows = []
    for depth in args.lengths:
        for name, make in makers.items():
            row = [f"{name}, K = {depth}"]
            for edit in EDITS.values():
                steps = tokens = 0
                for line in held_out():
                    source, output = (tokenizer.encode(text) for text in (line["text"], edit(line["text"])))
                    steps += passes(make(), [*source, *tokenizer.encode("\n\n# Edited:\n\n")], output, depth)
                    tokens += len(output)
                row.append(f"{tokens / steps:.2f}")
            rows.append(row)
    print(table(["", *EDITS], rows))
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
