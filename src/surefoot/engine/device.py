"""The speculative step as one CUDA graph, and the running of requests around it.

A step is what it is on the host (engine.loop): draft, verify, commit. Here nothing waits for the host: the tokens, the
lengths and the requests' parameters live on the device, the drafter reads what the last step committed, and the host
learns by a record what happened, one step late, while the next step runs (at once while requests wait for a slot, which
an ending may free). A request that ends is noticed then; the step
that ran for it in vain changes nothing that anyone reads.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from surefoot.drafters.combined import MIN_MATCH
from surefoot.drafters.none import NoDrafter
from surefoot.engine.loop import StepRecord
from surefoot.engine.runner import Progress
from surefoot.engine.stats import Clock
from surefoot.engine.target import prefill_chunk
from surefoot.errors import NumericalError
from surefoot.kernels.fused import ngram
from surefoot.kernels.fused.launch import recorded
from surefoot.kernels.fused.rows import Text
from surefoot.model import DraftHead
from surefoot.model.fused import FusedModel
from surefoot.sequence import Sequence
from surefoot.types import Draft, Drafter, Verdict
from surefoot.verify.fused.acceptance import RECORD, Rejection, accept
from surefoot.verify.fused.requests import Requests
from surefoot.verify.fused.sampling import Workspace, choose, draw_draft

DeviceDrafterName = Literal["none", "ngram", "mtp", "mtp+ngram"]
DEVICE_DRAFTERS = get_args(DeviceDrafterName)
AHEAD = 2  # steps in flight


class StepDrafter(NoDrafter):
    """Stands for a drafter that is part of the step: it has a name, and nothing to do."""

    def __init__(self, name: str) -> None:
        self.name = name


class Overwrite(Protocol):
    """Puts other drafts in the place of the drafter's own. It is recorded with the step, so it must not wait for the
    host; what it writes are point masses, so no request under the p/q rule may meet it."""

    def start(self, sequence: Sequence) -> None:
        """The sequence has been put into its slot."""

    def __call__(self, text: Text) -> None:
        """`text.drafts` in place."""


class DeviceStep:
    """One step for the first `batch` slots: up to `depth` draft tokens each, verification, acceptance, commit.

    `sampled` steps can judge by the p/q rule; the others serve greedy and coupled requests only, and cost less. Ids
    from `size` on have no token and never come.
    """

    def __init__(self, model: FusedModel, requests: Requests, slots: Tensor, drafter: DeviceDrafterName,
                 depth: int, sampled: bool, draft_head: DraftHead | None = None,
                 overwrite: Overwrite | None = None, size: int | None = None) -> None:  # fmt: skip
        assert not (sampled and overwrite), "an overwritten draft has no distribution"
        self._model, self._requests, self._drafter, self._depth = model, requests, drafter, depth
        self._draft_head, self._overwrite = draft_head, overwrite
        device, progress, batch = slots.device, model.progress, len(slots)
        vocab_size = model.decoder.config.vocab_size
        self._padding = slice(size, None) if size is not None and size < vocab_size else None

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._text = Text(slots, progress.length, progress.tokens, numbers(batch, depth))
        self._starts = numbers(depth + 1, model.slots)
        self._offsets = torch.arange(-1, depth, dtype=torch.int32, device=device)[:, None]
        window = depth + 1
        self._choices, self._bad = numbers(batch * window), numbers(batch * window)
        self._unread = numbers(batch)
        self._accepted, self._following = numbers(batch), numbers(batch)
        self.report = numbers(batch, depth + RECORD)
        self._workspace = self._draft_workspace = Workspace.empty(batch * window, vocab_size, device)
        if draft_head is not None:
            self._draft_workspace = Workspace.empty(batch, len(draft_head.ids), device)
        self._lookup = ngram.workspace(batch, progress.tokens.shape[1], device)
        self._copied, self._count, self._match = numbers(batch, depth), numbers(batch), numbers(batch)
        self._certain = torch.full_like(self._count, int(drafter == "ngram" or depth == 0))
        self._rejection, self._draft_logits = None, None
        if sampled:
            logits = model.scratch.take("logits", batch * window, vocab_size)
            drawn = workspace = None
            if "mtp" in drafter and depth:
                # Behind a draft head, what it has no row for stays impossible.
                self._draft_logits = drawn = torch.full((batch, depth, vocab_size), -math.inf, device=device)
                drawn, workspace = drawn.view(-1, vocab_size), Workspace.empty(batch * depth, vocab_size, device)
            self._rejection = Rejection.of(logits, self._workspace, self._certain, drawn, workspace)
        self.launch: Callable[[], None] = self.run

    def run(self) -> None:
        """Draft, verify, commit."""
        text, progress, window = self._text, self._model.progress, self._depth + 1
        if self._depth:
            self._draft()
            if self._overwrite is not None:
                self._overwrite(text)
        logits = self._model.score(text, window)
        if self._padding is not None:
            logits[:, self._padding] = -math.inf
        choose(logits, self._requests, text.slots, text.length, self._workspace, self._choices, self._bad,
               window=window)  # fmt: skip
        accept(text.drafts, self._choices, self._bad, self._requests, text.slots, text.length, text.tokens,
               progress.replay, self._accepted, self._following, self.report, self._rejection)  # fmt: skip
        progress.fresh.copy_(progress.replay)

    def record(self) -> None:
        """Make `launch` the replay of a CUDA graph. No slot may be in use."""
        self.launch = recorded(self.run)

    def _draft(self) -> None:
        text = self._text
        copies, heads = "ngram" in self._drafter, "mtp" in self._drafter
        if heads:
            self._chain()
        if copies:
            into = self._copied if heads else text.drafts
            ngram.propose(text.tokens, text.length, text.slots, into, self._count, self._match, self._lookup,
                          depth=self._depth)  # fmt: skip
        if copies and heads:
            torch.ge(self._match, MIN_MATCH, out=self._certain)
            torch.where(self._certain.bool()[:, None], self._copied, text.drafts, out=text.drafts)

    def _chain(self) -> None:
        """The head, chained: the first row of the draft comes from the target's hidden states."""
        model, text = self._model, self._text
        torch.add(text.length, self._offsets, out=self._starts)
        torch.sub(text.length, model.progress.fresh, out=self._starts[0])
        head, ids = self._draft_head, None if self._draft_head is None else self._draft_head.ids
        for j in range(self._depth):
            start = self._starts[j]
            logits = model.draft_next(text, start, head) if j else model.draft_first(text, start, self._depth + 1, head)
            if self._draft_logits is not None:
                rows = self._draft_logits[:, j]
                rows.copy_(logits) if ids is None else rows.index_copy_(1, ids, logits)
            draw_draft(logits, self._requests, text.slots, text.length, self._draft_workspace, text.drafts[:, j],
                       self._unread, window=1, offset=j, ids=ids)  # fmt: skip


class DeviceTarget:
    """The fused model with a drafter in its step, and the runner of its requests. All slots are idle between runs."""

    def __init__(self, model: FusedModel, drafter: DeviceDrafterName, draft_length: int,
                 draft_head: DraftHead | None = None, overwrite: Overwrite | None = None,
                 size: int | None = None) -> None:  # fmt: skip
        self.model, self.decoder, self._draft_head, self._size = model, model.decoder, draft_head, size
        self.vocab_size, self.max_len, self.slots = model.decoder.config.vocab_size, model.decoder.max_len, model.slots
        self.drafter: Drafter = StepDrafter(drafter)
        self._name, self._overwrite = drafter, overwrite
        self._depth = 0 if drafter == "none" else draft_length
        device = model.decoder.device
        self._requests = Requests.empty(model.slots, device)
        self._slots = torch.full((model.slots,), -1, dtype=torch.int32, device=device)
        self.steps: dict[tuple[int, bool], DeviceStep] = {}
        self.graph_bytes = 0  # what the device had less of when steps were recorded

    def warm_up(self, sampled: bool = False, progress: Progress | None = None) -> None:
        """Compile and record the steps of every batch size that are not recorded yet. `progress(done, total)` counts
        batch sizes."""
        sizes = list(_sizes(self.slots))
        for done, size in enumerate(sizes, start=1):
            self._step(size, sampled)
            if progress is not None:
                progress(done, len(sizes))

    def run(
        self, sequences: Iterable[Sequence], clock: Clock | None = None, progress: Progress | None = None
    ) -> Generator[StepRecord, None, None]:
        """Decode all sequences and yield every step of every sequence: `engine.runner.run` for this target."""
        clock = clock or Clock()
        waiting = deque(sequences)
        if any(_by_ratio(sequence) for sequence in waiting):
            self.warm_up(sampled=True)
        running: dict[int, Sequence] = {}
        flights: deque[_Flight] = deque()
        try:
            while waiting or running or flights:
                while waiting and len(running) < self.slots and not flights:
                    sequence = waiting.popleft()
                    sequence.slot = min(set(range(self.slots)) - running.keys())
                    with clock.phase("prefill_s"):
                        self._start(sequence, progress)
                    running[sequence.slot] = sequence
                records: list[StepRecord] = []
                with clock.phase("decode_s"):
                    if running and not (waiting and len(running) < self.slots):
                        flights.append(self._launch(running))
                    if flights and (len(flights) >= AHEAD or not running or waiting):
                        records = flights.popleft().land()
                    for record in records:
                        if record.sequence.finish_reason is not None:
                            self._release(record.sequence.slot)
                            del running[record.sequence.slot]
                yield from records
        finally:
            for slot in running:
                self._release(slot)

    def plain(self) -> DeviceTarget:
        """Plain decoding over the same model and slots."""
        return DeviceTarget(self.model, "none", 0, size=self._size)

    def score(self, tokens: Seq[int]) -> Tensor:
        """The logits after each of the tokens, [T, V] float32; uses slot 0."""
        hidden = torch.cat([part for _, part in _read(self.model, 0, tokens)])
        return torch.cat([self.decoder.bulk_logits(part) for part in hidden.split(512)])

    def _start(self, sequence: Sequence, progress: Progress | None) -> None:
        """Read the prompt and hand the slot to the step."""
        slot = sequence.slot
        read_prompt(self.model, slot, sequence.tokens, progress)
        self._requests.set(slot, sequence.params, sequence.limit)
        self._slots[slot] = slot
        if self._overwrite is not None:
            self._overwrite.start(sequence)

    def _release(self, slot: int) -> None:
        self._slots[slot] = -1

    def _launch(self, running: dict[int, Sequence]) -> _Flight:
        size = next(size for size in _sizes(self.slots) if size > max(running))
        step = self._step(size, any(_by_ratio(sequence) for sequence in running.values()))
        step.launch()
        return _Flight(dict(running), step.report, self.drafter.name)

    def _step(self, size: int, sampled: bool) -> DeviceStep:
        """The step for the first `size` slots, recorded on first use."""
        if (size, sampled) not in self.steps:
            step = DeviceStep(self.model, self._requests, self._slots[:size], self._name, self._depth, sampled,
                              self._draft_head, self._overwrite, self._size)  # fmt: skip
            if self._slots.is_cuda:
                # While it is recorded, no slot is in use; what the step writes all the same is put back.
                progress = self.model.progress
                touched = (self._slots, progress.fresh, progress.hidden)
                before = [tensor.clone() for tensor in touched]
                self._slots.fill_(-1)
                free, _ = torch.cuda.mem_get_info(self._slots.device)
                step.record()
                self.graph_bytes += max(0, free - torch.cuda.mem_get_info(self._slots.device)[0])
                for tensor, value in zip(touched, before, strict=True):
                    tensor.copy_(value)
            self.steps[size, sampled] = step
        return self.steps[size, sampled]


def read_prompt(model: FusedModel, slot: int, prompt: list[int], progress: Progress | None = None) -> None:
    """Read the prompt into the slot, all but its last token, and fill the head's lane; the next step goes on from
    there. A prompt that the cache has kept is not read again."""
    cache = model.prefill_cache
    kept = cache.recall(slot, prompt)
    hidden = None if kept is None else kept.hidden
    if kept is None:
        for position, part in _read(model, slot, prompt[:-1]):
            if progress is not None:
                progress(position + len(part), len(prompt))
            if model.head is not None:
                following = prompt[position + 1 : position + 1 + len(part)]
                model.head.prefill(part, following, model.lane, slot, position)
            hidden = part[-1]
        cache.keep(slot, prompt, hidden)
    cache.finish(slot)
    model.progress.start(slot, prompt, hidden)


def _read(model: FusedModel, slot: int, tokens: Seq[int]) -> Iterator[tuple[int, Tensor]]:
    model.prefill_cache.reset(slot)
    step = prefill_chunk(model.decoder.device)
    for position in range(0, len(tokens), step):
        yield position, model.decoder.prefill(tokens[position : position + step], model.prefill_cache, slot)


class _Flight:
    """A step that was launched: what it will report, and about whom."""

    def __init__(self, running: dict[int, Sequence], record: Tensor, source: str) -> None:
        self._running, self._source = running, source
        self._landed: torch.cuda.Event | None = None
        if record.is_cuda:
            self._record = torch.empty(record.shape, dtype=record.dtype, pin_memory=True)
            self._record.copy_(record, non_blocking=True)
            self._landed = torch.cuda.Event()
            self._landed.record()
        else:
            self._record = record.clone()

    def land(self) -> list[StepRecord]:
        """Wait for the step and say what it did to the sequences that were still running.

        Raises NumericalError naming the position of logits that cannot be used."""
        if self._landed is not None:
            self._landed.synchronize()
        rows, records = self._record.tolist(), []
        for slot, sequence in self._running.items():
            if sequence.finish_reason is not None:
                continue
            *drafts, accepted, token, flags, position = rows[slot]
            if flags & ((2 << accepted) - 1):
                row = (flags & -flags).bit_length() - 1
                raise NumericalError(f"logits at position {position + row}: expected finite numbers, found NaN or inf")
            length = drafts.index(-1) if -1 in drafts else len(drafts)
            length = max(0, min(length, sequence.limit - position - 1))  # the kernel judges none behind the limit
            emitted = sequence.extend((*drafts[:accepted], token))
            draft = Draft(tuple(drafts[:length]), source=self._source)
            records.append(StepRecord(sequence, position, draft, Verdict(accepted, token), emitted))
        return records


def _by_ratio(sequence: Sequence) -> bool:
    """Whether the sequence's drafts are judged by the p/q rule."""
    return sequence.params.acceptance == "rejection" and not sequence.params.greedy


def _sizes(slots: int) -> Iterator[int]:
    """Batch sizes that have a step of their own: powers of two, and all slots."""
    size = 1
    while size < slots:
        yield size
        size *= 2
    yield slots
