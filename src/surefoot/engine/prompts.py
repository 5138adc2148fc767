"""Prompts on their way in: requests that wait for a slot, and those whose prompts are being read, a chunk in turn."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from surefoot.cache.prefix import Node, PrefixCache
from surefoot.engine.loop import prefill
from surefoot.sequence import Sequence
from surefoot.types import Drafter, Kept, ReadsPrompts, Resumable, ResumableDrafter, ResumableTarget

Progress = Callable[[int, int], None]
STATE = "target"  # the part that the target keeps of a prompt


def read(sequence: Sequence, drafter: Drafter, target: ReadsPrompts, prefixes: PrefixCache | None) -> Iterator[int]:
    """`loop.prefill`, but what `prefixes` has of the prompt is not read, and what is read is kept there."""
    if prefixes is None or not isinstance(target, ResumableTarget) or not isinstance(drafter, Resumable):
        yield from prefill(sequence, drafter, target)
        return
    lane = drafter if drafter.part is not None and isinstance(drafter, ResumableDrafter) else None
    parts = [STATE] if lane is None or lane.part is None else [STATE, lane.part]

    def copies(start: int, stop: int) -> dict[str, Kept]:
        kept = {STATE: target.keep(sequence.slot, start, stop)}
        return kept if lane is None else kept | {parts[1]: lane.keep(sequence, start, stop)}

    tokens = sequence.tokens[:-1]

    def known(node: Node | None) -> list[Node]:
        """What is kept behind a node; nothing for who scores the prompt, and so is shown all of it."""
        if node is None or sequence.prompt is not None:
            return []
        return prefixes.match(tokens, target.chunk, parts, node).path(node)

    node: Node | None = prefixes.root
    start, further = 0, known(prefixes.root)
    while True:
        if further:
            if lane is not None:
                lane.resume(sequence, [step.parts[parts[1]] for step in further])
            node = further[-1]
            sequence.cached_tokens += node.stop - start
            start = node.stop
        for done in prefill(sequence, drafter, target, [step.parts[STATE] for step in further]):
            if node is not None:
                piece = tokens[start:done]
                there = prefixes.child(node, piece, parts)
                node = prefixes.insert(node, piece, copies(start, done)) if there is None else there
            start = done
            yield done
            if further := known(node):
                break  # meanwhile, somebody else has read on
        else:
            return


@dataclass(frozen=True)
class Turns:
    """What came of a call of `Prompts.read`: the sequences whose prompts began to be read, those whose prompts have
    been read, and those that failed."""

    started: list[Sequence] = field(default_factory=list)
    ready: list[Sequence] = field(default_factory=list)
    failed: list[tuple[Sequence, Exception]] = field(default_factory=list)


@dataclass(eq=False)
class _Prompt:
    sequence: Sequence
    chunks: Iterator[int]
    done: int = 0
    begun: bool = False


class Prompts:
    """Up to `slots` sequences at a time are in, from the reading of their prompts to their `release`.

    `start(sequence)` reads its prompt into its slot, a chunk at a time, and yields how many tokens have been read. The
    first to come is the first to get a slot; with slots, all prompts are read in turns of one chunk, so that a long one
    neither holds up short ones nor waits for them. A call of `read` ends once `budget` tokens were read (so it reads
    less than a chunk more than that), or when nothing is left to read.
    """

    def __init__(
        self,
        slots: int,
        start: Callable[[Sequence], Iterator[int]],
        budget: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._start, self._budget, self._progress = start, budget, progress
        self._slots, self._touched = slots, 0
        self._free: list[int] = []  # of those below `_touched`; the others have never been taken
        self._reading: deque[_Prompt] = deque()
        self.waiting: deque[Sequence] = deque()

    @property
    def busy(self) -> bool:
        """Whether any prompt waits or is being read."""
        return bool(self.waiting or self._reading)

    def add(self, sequence: Sequence) -> None:
        """Let it wait for a slot."""
        self.waiting.append(sequence)

    def read(self) -> Turns:
        """Read chunks in turn. Sequences whose prompts have been read, or failed, hold their slots until they are
        released."""
        turns = Turns()
        spent = 0
        while self._budget is None or spent < self._budget:
            self._admit()
            if not self._reading:
                break
            prompt = self._reading[0]
            if not prompt.begun:
                turns.started.append(prompt.sequence)
            before, total = prompt.done, len(prompt.sequence.tokens)
            try:
                more = self._turn(prompt)
            except Exception as error:  # of the target or the drafter, about this prompt
                self._reading.popleft()
                turns.failed.append((prompt.sequence, error))
                continue
            self._reading.popleft()
            spent += prompt.done - before
            if self._progress is not None and prompt.done > before:
                self._progress(prompt.done, total)
            if more:
                self._reading.append(prompt)
            else:
                turns.ready.append(prompt.sequence)
        return turns

    def held(self) -> list[Sequence]:
        """Those that have a slot, and prompts that have not been read yet."""
        return [prompt.sequence for prompt in self._reading]

    def withdraw(self, sequence: Sequence) -> bool | None:
        """Take a sequence out whose prompt waits or is being read: whether anything of it was in its slot; None if
        there is no such sequence."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return False
        for prompt in self._reading:
            if prompt.sequence is sequence:
                self._reading.remove(prompt)
                if not prompt.begun:
                    heapq.heappush(self._free, sequence.slot)
                return prompt.begun
        return None

    def release(self, sequence: Sequence) -> None:
        """The slot of a sequence that was in is free again."""
        heapq.heappush(self._free, sequence.slot)

    def _admit(self) -> None:
        while self.waiting and (self._free or self._touched < self._slots):
            sequence = self.waiting.popleft()
            if not self._free:
                heapq.heappush(self._free, self._touched)
                self._touched += 1
            sequence.slot = heapq.heappop(self._free)
            self._reading.append(_Prompt(sequence, self._start(sequence)))

    def _turn(self, prompt: _Prompt) -> bool:
        """Read a chunk; whether there may be more."""
        prompt.begun = True
        done = next(prompt.chunks, None)
        if done is None:
            return False
        prompt.done = done
        # The last chunk is known by its end, so that the sequence need not wait for a turn to be told.
        return done < len(prompt.sequence.tokens) - 1 or next(prompt.chunks, None) is not None
