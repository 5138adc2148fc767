"""Scripted parts for running many requests at once, on top of `tests.fakes`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from surefoot.cache.prefix import Node, PrefixCache
from surefoot.drafters.none import NoDrafter
from surefoot.engine.runner import HostRunner, Ways, drain
from surefoot.prove.table import Row, Scripted, TableTarget, hashed_rows
from surefoot.sampling import SamplingParams
from surefoot.sequence import Sequence
from surefoot.types import Kept, Scores, Window
from surefoot.verify import choose

VOCAB = 5
POISON = 4  # a prompt that ends with it gives NaN after the third token of its output
ROW = hashed_rows(VOCAB)


class ChunkedTarget(TableTarget):
    """A resumable one, whose logits depend on where the chunks of the prompt ended as well, as the last bits of a real
    one's do."""

    def __init__(
        self, row: Row = ROW, vocab_size: int = VOCAB, max_len: int = 64, slots: int = 8, chunk: int = 3
    ) -> None:
        super().__init__(row, vocab_size, max_len, slots, hidden=True)
        self.chunk = chunk
        self.borders: dict[int, list[int]] = {}
        self.poisoned: dict[int, int] = {}  # by slot, the length of a prefix from which on rows are NaN
        self.read = 0  # tokens of prompts
        self.meanwhile: Callable[[], None] = lambda: None  # happens between verify and commit

    def prefill(self, slot: int, tokens: Seq[int]) -> Iterator[tuple[int, Tensor]]:
        return self.resume(slot, tokens, ())

    def resume(self, slot: int, tokens: Seq[int], kept: Seq[Kept]) -> Iterator[tuple[int, Tensor]]:
        assert 0 <= slot < self.slots
        begin = kept[0].start if kept else 0
        assert begin == len(self.committed.get(slot, ())), "a slot that somebody has, or that stands elsewhere"
        assert [copy.start for copy in kept] == [begin, *(copy.stop for copy in kept[:-1])][: len(kept)]
        self.committed.setdefault(slot, []).extend(token for copy in kept for token in copy.tensors[0].tolist())
        self.borders[slot] = kept[-1].tensors[1].tolist() if kept else []
        start = len(self.committed[slot])
        assert self.committed[slot] == list(tokens[:start]), "a beginning that is another's"
        for position in range(start, len(tokens), self.chunk):
            piece = self._checked(tokens[position : position + self.chunk])
            self.committed[slot] += piece
            self.borders[slot].append(len(self.committed[slot]))
            self.read += len(piece)
            yield position, torch.tensor(piece, dtype=torch.float32)[:, None]

    def keep(self, slot: int, start: int, stop: int) -> Kept:
        assert slot not in self.windows
        assert len(self.committed[slot]) == stop
        return Kept(start, stop, (torch.tensor(self.committed[slot][start:stop]), torch.tensor(self.borders[slot])))

    def look(self, slot: int, prefix: Seq[int]) -> Tensor:
        """The row that follows the prefix in the slot."""
        if len(prefix) >= self.poisoned.get(slot, len(prefix) + 1):
            return torch.full((self.vocab_size,), torch.nan)
        return self.row((*self.borders[slot], -1, *prefix))

    def verify(self, windows: Seq[Window]) -> list[Scores]:
        answers = []
        for window, scores in zip(windows, super().verify(windows), strict=True):
            prefix = [*self.committed[window.slot], *window.tokens]
            start = len(prefix) - len(window.tokens) + 1
            rows = [self.look(window.slot, prefix[:end]) for end in range(start, len(prefix) + 1)]
            answers.append(Scores(torch.stack(rows), scores.hidden))
        self.meanwhile()
        return answers

    def release(self, slot: int) -> None:
        super().release(slot)
        self.borders.pop(slot, None)


class Laned(Scripted):
    """Knows the target two times in three, and keeps a lane: all that it was shown, which it checks against the text
    whenever it drafts."""

    name = "laned"
    part: str | None = "lane"

    def __init__(self, target: ChunkedTarget) -> None:
        super().__init__()
        self.target = target
        self.lane: dict[int, list[int]] = {}

    def token(self, sequence: Sequence, prefix: tuple[int, ...]) -> tuple[int, Tensor | None]:
        row = self.target.look(sequence.slot, prefix)
        if row.isnan().any():
            return 0, None
        shift = int(hash(prefix) % 3 == 0)
        return (choose(row[None], sequence.params, len(prefix))[0] + shift) % self.target.vocab_size, None

    def observe(self, sequence: Sequence, position: int, hidden: Tensor | None) -> None:
        super().observe(sequence, position, hidden)
        assert hidden is not None
        lane = self.lane.setdefault(sequence.slot, [])
        assert len(lane) == position
        lane += [int(value) for value in hidden[:, 0]]
        assert lane == sequence.tokens[: len(lane)]

    def keep(self, sequence: Sequence, start: int, stop: int) -> Kept:
        lane = self.lane[sequence.slot]
        assert len(lane) == stop
        return Kept(start, stop, (torch.tensor(lane[start:stop]),))

    def resume(self, sequence: Sequence, kept: Seq[Kept]) -> None:
        lane = self.lane.setdefault(sequence.slot, [])
        assert len(lane) == kept[0].start
        lane += [token for copy in kept for token in copy.tensors[0].tolist()]
        assert lane == sequence.tokens[: len(lane)]
        self.seen[sequence.slot] = len(lane)

    def release(self, sequence: Sequence) -> None:
        super().release(sequence)
        self.lane.pop(sequence.slot, None)


class Moody(Laned):
    """Fails for sequences whose third token is the poison."""

    name = "moody"

    def token(self, sequence: Sequence, prefix: tuple[int, ...]) -> tuple[int, Tensor | None]:
        if sequence.tokens[2:3] == [POISON]:
            raise ValueError("not this one")
        return super().token(sequence, prefix)


def sequence_of(prompt: Seq[int], params: SamplingParams, max_len: int = 64) -> Sequence:
    stop = frozenset[int]() if params.ignore_eos else frozenset({0})
    return Sequence(0, list(prompt), params, min(len(prompt) + params.max_new_tokens, max_len), stop)


_SOLO: dict[tuple[tuple[int, ...], SamplingParams, int], list[int]] = {}


def solo(prompt: Seq[int], params: SamplingParams, chunk: int = 3) -> list[int]:
    """The output of a request that runs alone, plainly, on a target of its own."""
    key = (tuple(prompt), params, chunk)
    if key not in _SOLO:
        sequence = sequence_of(prompt, params)
        list(drain(HostRunner(ChunkedTarget(slots=1, chunk=chunk), NoDrafter(), 0, Ways()), [sequence]))
        _SOLO[key] = sequence.output
    return _SOLO[key]


def nodes_of(prefixes: PrefixCache) -> list[Node]:
    """Every node of the tree, by a walk from its root."""
    found, waiting = [], [prefixes.root]
    while waiting:
        node = waiting.pop()
        waiting += node.children.values()
        found.append(node)
    return found[1:]


def check_memory(prefixes: PrefixCache) -> None:
    """What is used is what the tree holds, to the byte, and within the limit."""
    nodes = nodes_of(prefixes)
    tensors = [tensor for node in nodes for kept in node.parts.values() for tensor in kept.tensors]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}) == sum(
        tensor.numel() > 0 for tensor in tensors
    ), "memory that two copies share"
    assert prefixes.used == sum(tensor.untyped_storage().nbytes() for tensor in tensors) + sum(
        len(node.key) for node in nodes
    )
    assert prefixes.used <= prefixes.limit
    assert len(prefixes) == len(nodes)
