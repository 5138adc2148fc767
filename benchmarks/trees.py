"""Would a tree of drafts pay? An estimate, in the tree's favour, from what the head ranks and what passes cost.

    python benchmarks/trees.py [--model surefoot-demo] [--tokens 96] [--depth 6] [--threads 1]

The target continues the built-in prompts greedily. At every position of these texts the head is chained along the text,
and at each depth the true token's rank among its tokens is noted (0: the one that a chain would draft). A tree is a set
of paths of ranks; at a position it has as many tokens kept as it goes along with the ranks there. Of all trees of N
nodes the best for these very positions is taken, which no real one can beat. A step with it costs a pass over N + 1
tokens, as if they were a chain, a draft step a level however wide, and one copy of the recurrent states for each branch
but the first: a state has one continuation, so a branch needs its own. What sharing attention's cache, choosing among
ranks or undoing a branch would cost is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import checkout
from benchmarks.report import table
from surefoot import Engine, SamplingParams
from surefoot.bench.machine import Watch
from surefoot.bench.passes import EagerPasses
from surefoot.bench.prompts import kinds
from surefoot.bench.turns import Action, take_turns
from surefoot.cache import RecurrentCache
from surefoot.engine.arguments import DTYPES
from surefoot.engine.loaded import LoadedModel
from surefoot.kernels.rows import padded_rows
from surefoot.model import MTPHead
from surefoot.model.spans import Layout

MAX_LEN = 1024
CONTEXT = 256  # tokens before the passes that are timed
ROUNDS = 10
WIDEST = 16  # nodes of the largest tree
Ranks = tuple[int, ...]  # ranks from the root on


def ranks_along(head: MTPHead, hidden: torch.Tensor, tokens: Seq[int], start: int, depth: int) -> list[Ranks]:
    """For every draft that begins behind position `start` or later: the ranks of the `depth` tokens that truly come.

    `hidden` [T, H]: the target's states of `tokens` [T + 1]. Rows of the lane in front of a draft are the target's."""
    decoder = head.decoder
    device, least = decoder.device, decoder.linear.least_rows
    lane, rows = head.build_lane(1), padded_rows(1, device, least)
    if start:
        head.prefill(hidden[:start], tokens[1 : start + 1], lane, 0, 0)
    found = []
    for first in range(start, len(tokens) - 1 - depth):
        state, ranks = hidden[first : first + 1], []
        for place in range(first, first + depth):
            out = head.decode(state, [tokens[place + 1]], lane, Layout.of([(0, place, 1)], device, least))
            state = out[:1]
            logits = decoder.logits(state.expand(rows, -1))[0]
            ranks.append(int((logits > logits[tokens[place + 2]]).sum()))
        found.append(tuple(ranks))
    return found


def best_trees(found: Seq[Ranks], most: int) -> list[Ranks]:
    """Paths in an order in which every beginning of the list is the best tree of its size: the most frequent first, a
    path never before its own beginning, which is at least as frequent."""
    counts = Counter(ranks[:end] for ranks in found for end in range(1, len(ranks) + 1))
    return sorted(counts, key=lambda path: (-counts[path], len(path), path))[:most]


def kept_of(tree: Iterable[Ranks], found: Seq[Ranks]) -> float:
    """Draft tokens that a step keeps on average."""
    paths = set(tree)
    return sum(ranks[:end] in paths for ranks in found for end in range(1, len(ranks) + 1)) / len(found)


def branches(tree: Iterable[Ranks]) -> int:
    """Nodes that are not their parent's first: each needs a state of its own."""
    parents = [path[:-1] for path in tree]
    return len(parents) - len(set(parents))


def rows_of(found: Seq[Ranks], ms: dict[str, float], deepest: int) -> list[list[str]]:
    """The best chain and the best tree of each size that passes were timed for; speeds over plain decoding's."""
    order = best_trees(found, WIDEST)
    rows = []
    for size in range(1, WIDEST + 1):
        if f"verify {size + 1}" not in ms:
            break
        chain, tree = [(0,) * end for end in range(1, size + 1)], order[:size]
        row = [str(size)]
        for nodes in (chain, tree):
            tokens, depth = 1 + kept_of(nodes, found), max(map(len, nodes))
            cost = ms[f"verify {size + 1}"] + depth * ms["draft"] + branches(nodes) * ms["copy"]
            row += ["", ""] if depth > deepest else [f"{tokens:.2f}", f"{tokens * ms['verify 1'] / cost:.2f} x"]
        rows.append([*row, str(max(map(len, tree))), str(branches(tree))])
    return rows


def costs_of(report: Path) -> dict[str, float]:
    """The same milliseconds from what `surefoot bench --json` has saved; states are read and written at the bandwidth
    that was measured."""
    saved = json.loads(report.read_text(encoding="utf-8"))
    ms = {name: float(spread["median"]) for name, spread in saved["passes"].items()}
    return ms | {"copy": 2000 * saved["step_bytes"]["state"] / saved["ceiling"]["bandwidth"]}


def times_of(model: LoadedModel) -> dict[str, float]:
    """Milliseconds of passes over 1 to WIDEST + 1 tokens, of a draft step, and of copying the recurrent states."""
    target = model.target(1)
    passes = EagerPasses(target, model.head, CONTEXT, range(1, WIDEST + 2))
    states = [layer.state[0] for layer in target.cache.layers if isinstance(layer, RecurrentCache)]
    actions: dict[str, Action] = passes.actions()
    copies = [torch.empty_like(state) for state in states]
    actions["copy"] = lambda: [copy.copy_(state) for copy, state in zip(copies, states, strict=True)]
    times = take_turns(actions, ROUNDS, passes.rewind)
    passes.close()
    return {name: spread.median for name, spread in times.items()}


def main() -> None:
    """Print ranks by depth, costs, and the best chain and tree of each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="surefoot-demo")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--costs", type=Path, help="take the times of this file of `surefoot bench --json`")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    watch = Watch()
    model = LoadedModel.from_checkpoint(
        args.model, device=torch.device("cpu"), dtype=DTYPES[args.dtype], max_len=MAX_LEN, mtp="require"
    )
    assert model.head is not None
    assert model.tokenizer is not None
    plain = Engine.over(model, drafter="none", draft_length=0)
    params = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True)
    found: list[Ranks] = []
    for text in (text for texts in kinds().values() for text in texts):
        prompt = model.tokenizer.encode(text)
        tokens = [*prompt, *plain.generate(prompt, params).token_ids]
        with torch.inference_mode():
            hidden = torch.cat([h for _, h in model.target(1).prefill(0, tokens[:-1])])
            found += ranks_along(model.head, hidden, tokens, len(prompt) - 1, args.depth)
    with torch.inference_mode():
        ms = times_of(model) if args.costs is None else costs_of(args.costs)

    print(f"{len(found)} positions; the true token is among the head's k first ones, if all before it are right\n")
    depths = range(args.depth)
    shares = [[f"{sum(ranks[d] < k for ranks in found) / len(found):.1%}" for d in depths] for k in (1, 2, 3, 4, 8)]
    print(
        table(["k", *(f"depth {d + 1}" for d in depths)], [[k, *row] for k, row in zip("12348", shares, strict=True)])
    )
    listed = ", ".join(f"{value:.2f}" for name, value in ms.items() if name.startswith("verify"))
    print(f"\nT_v(1), T_v(2), ... {listed} ms; T_d {ms['draft']:.2f} ms; copying the states {ms['copy']:.3f} ms\n")

    print(table(["nodes", "chain: tokens a step", "speed", "best tree: tokens a step", "speed", "depth", "copies"],
                rows_of(found, ms, args.depth)))  # fmt: skip
    machine = checkout.machine(watch)
    print(f"\n{machine.command}: {machine.cores} cores, {machine.threads} thread, load {machine.load}")


if __name__ == "__main__":
    main()
