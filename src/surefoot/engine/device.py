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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Literal, Protocol, TypeVar, get_args

import torch
from torch import Tensor

from surefoot.cache.prefix import PrefixCache, keep_layers
from surefoot.drafters.auto import DEEPEST
from surefoot.drafters.combined import MIN_MATCH
from surefoot.drafters.lane import Lane
from surefoot.drafters.none import NoDrafter
from surefoot.drafters.policy import StepCosts
from surefoot.engine.depths import ChosenDepth, Depths, FixedDepth
from surefoot.engine.drafting import DRAFT_LENGTH
from surefoot.engine.loop import Failed, StepRecord
from surefoot.engine.prompts import Progress, read
from surefoot.engine.runner import Runner, Ways, drain
from surefoot.engine.stats import Clock
from surefoot.engine.target import prefill_chunk, read_prompt
from surefoot.errors import InputError, NumericalError
from surefoot.kernels.fused import ngram
from surefoot.kernels.fused.launch import recorded
from surefoot.kernels.fused.rows import Text
from surefoot.model import DraftHead
from surefoot.model.fused import FusedModel
from surefoot.sampling import SamplingParams
from surefoot.sequence import Sequence
from surefoot.types import Draft, Drafter, Kept, Verdict
from surefoot.verify.fused.acceptance import RECORD, Rejection, accept
from surefoot.verify.fused.requests import Requests
from surefoot.verify.fused.sampling import Workspace, choose, draw_draft

DeviceDrafterName = Literal["none", "ngram", "mtp", "mtp+ngram", "auto"]
DEVICE_DRAFTERS = get_args(DeviceDrafterName)
AHEAD = 2  # steps in flight
Recordable = TypeVar("Recordable", "DeviceStep", "LaneFill")


class StepDrafter(NoDrafter):
    """Stands for a drafter that is part of the step: it takes prompts into the head's lane, if there is a head, and
    leaves the rest to the step."""

    def __init__(self, name: str, lane: Lane | None) -> None:
        self.name, self._lane = name, lane
        self.part = None if lane is None else lane.part

    def observe(self, sequence: Sequence, position: int, hidden: Tensor | None) -> None:
        """Take a chunk of the prompt into the lane."""
        if self._lane is not None:
            self._lane.observe(sequence, position, hidden)

    def last_state(self, slot: int) -> Tensor | None:
        """The state [H] whose row is not in the lane yet, as the token behind it is the step's to read."""
        pending = None if self._lane is None else self._lane.pending[slot]
        return None if pending is None else pending[1][-1]

    def keep(self, sequence: Sequence, start: int, stop: int) -> Kept:
        """Copy the lane's rows and the state that waits."""
        assert self._lane is not None
        return self._lane.keep(sequence.slot, start, stop)

    def resume(self, sequence: Sequence, kept: Seq[Kept]) -> None:
        """Put them back."""
        assert self._lane is not None
        self._lane.resume(sequence.slot, kept)

    def release(self, sequence: Sequence) -> None:
        """Forget the sequence's prompt."""
        if self._lane is not None:
            self._lane.release(sequence.slot)


class DeviceReader:
    """Reads prompts into a model's slots: a `ResumableTarget`, but for `release`, with the head's lane."""

    def __init__(self, model: FusedModel, drafter: str = "none", chunk: int | None = None) -> None:
        self._model = model
        self.chunk = prefill_chunk(model.decoder.device) if chunk is None else chunk
        lane = None if model.head is None else Lane(model.head, model.lane, model.slots, most_pending=1)
        self.drafter = StepDrafter(drafter, lane)

    def read(self, sequence: Sequence, prefixes: PrefixCache | None = None) -> Iterator[int]:
        """Read the prompt into its slot, all but its last token, and fill the head's lane; the next step goes on from
        there. Yields after every chunk how many tokens have been read. A prompt that the cache has kept is not read
        again."""
        slot, prompt, cache = sequence.slot, list(sequence.tokens), self._model.prefill_cache
        kept = cache.recall(slot, prompt)
        if kept is None:
            yield from read(sequence, self.drafter, self, prefixes)
            hidden = self.drafter.last_state(slot)
            cache.keep(slot, prompt, hidden)
        else:
            hidden = kept.hidden
        cache.finish(slot)
        self._model.progress.start(slot, prompt, hidden)

    def prefill(self, slot: int, tokens: Seq[int]) -> Iterator[tuple[int, Tensor]]:
        """Empty the slot and read the tokens into it, a chunk at a time."""
        return self.resume(slot, tokens, ())

    def keep(self, slot: int, start: int, stop: int) -> Kept:
        """Copy what was read from `start` on, and the states; waits for the device."""
        return keep_layers(self._model.prefill_cache.layers, slot, start, stop)

    def resume(self, slot: int, tokens: Seq[int], kept: Seq[Kept]) -> Iterator[tuple[int, Tensor]]:
        """`prefill` behind what was kept."""
        return read_prompt(self._model.decoder, self._model.prefill_cache, slot, tokens, self.chunk, kept)


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
    from `size` on have no token and never come. The head's lane takes in `taken` of the states that wait in front of a
    draft: no more may wait then. As many as a window has, if not given; a step without the head leaves them waiting.
    """

    def __init__(self, model: FusedModel, requests: Requests, slots: Tensor, drafter: DeviceDrafterName,
                 depth: int, sampled: bool, draft_head: DraftHead | None = None,
                 overwrite: Overwrite | None = None, size: int | None = None,
                 taken: int | None = None) -> None:  # fmt: skip
        assert not (sampled and overwrite), "an overwritten draft has no distribution"
        self._model, self._requests, self._drafter, self._depth = model, requests, drafter, depth
        self._draft_head, self._overwrite = draft_head, overwrite
        device, progress, batch = slots.device, model.progress, len(slots)
        vocab_size = model.decoder.config.vocab_size
        self._padding = slice(size, None) if size is not None and size < vocab_size else None

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._text = Text(slots, progress.length, progress.tokens, numbers(batch, depth))
        self._starts, self._waiting = numbers(depth + 1, model.slots), numbers(model.slots)
        self._offsets = torch.arange(-1, depth, dtype=torch.int32, device=device)[:, None]
        window = depth + 1
        self._taken = window if taken is None else taken
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
        torch.sub(text.length, model.progress.laned, out=self._waiting)
        head, ids = self._draft_head, None if self._draft_head is None else self._draft_head.ids
        for j in range(self._depth):
            if j:
                logits = model.draft_next(text, self._starts[j], head)
            else:
                logits = model.draft_first(text, self._waiting, self._taken, head)
                model.progress.laned.copy_(text.length)
            if self._draft_logits is not None:
                rows = self._draft_logits[:, j]
                rows.copy_(logits) if ids is None else rows.index_copy_(1, ids, logits)
            draw_draft(logits, self._requests, text.slots, text.length, self._draft_workspace, text.drafts[:, j],
                       self._unread, window=1, offset=j, ids=ids)  # fmt: skip


class LaneFill:
    """Takes states that wait into the head's lane for the first `batch` slots, a window of them."""

    def __init__(self, model: FusedModel, slots: Tensor) -> None:
        progress = model.progress
        self._model = model
        self._text = Text(slots, progress.length, progress.tokens, torch.zeros_like(slots)[:, None])
        self.launch: Callable[[], None] = self.run

    def run(self) -> None:
        """A window; `progress.laned` follows."""
        self._model.fill_lane(self._text)

    def record(self) -> None:
        """Make `launch` the replay of a CUDA graph. No slot may be in use."""
        self.launch = recorded(self.run)


class DeviceTarget:
    """The fused model with a drafter in its step, and the runner of its requests. All slots are idle between runs.

    "auto" has a step for every depth from 0, plain decoding, to `draft_length`, which `depths` chooses among (always
    the longest, until `choose_by`). A plain step leaves the head's lane behind; it is filled before more
    states wait than a draft takes in or than there is room for. The host counts them as if all drafts in flight were
    kept. Steps that judge by the p/q rule have one depth, `fixed`.
    """

    def __init__(self, model: FusedModel, drafter: DeviceDrafterName, draft_length: int,
                 draft_head: DraftHead | None = None, overwrite: Overwrite | None = None,
                 size: int | None = None, chunk: int | None = None) -> None:  # fmt: skip
        self.model, self.decoder, self._draft_head, self._size = model, model.decoder, draft_head, size
        self.vocab_size, self.max_len, self.slots = model.decoder.config.vocab_size, model.decoder.max_len, model.slots
        self.reader = DeviceReader(model, drafter, chunk)
        self.drafter, self.chunk = self.reader.drafter, self.reader.chunk
        self._overwrite = overwrite
        self.chooses = drafter == "auto"
        self.most = 0 if drafter == "none" else min(draft_length, DEEPEST) if self.chooses else draft_length
        self.fixed = min(DRAFT_LENGTH, self.most) if self.chooses else self.most
        self.depths: Depths = FixedDepth(self.most)
        self.arm: DeviceDrafterName = drafter
        if self.chooses:
            self.arm = "ngram" if model.head is None else "mtp+ngram"
        self._waiting = [0] * model.slots
        device = model.decoder.device
        self._requests = Requests.empty(model.slots, device)
        self._slots = torch.full((model.slots,), -1, dtype=torch.int32, device=device)
        self.steps: dict[tuple[int, bool, int], DeviceStep] = {}
        self.fills: dict[int, LaneFill] = {}
        self.graph_bytes = 0  # what the device had less of when steps were recorded

    def warm_up(self, sampled: bool = False, progress: Progress | None = None) -> None:
        """Compile and record the steps of every batch size that are not recorded yet. `progress(done, total)` counts
        batch sizes."""
        sizes = list(sizes_of(self.slots))
        for done, size in enumerate(sizes, start=1):
            for depth in range(self.most + 1) if self.chooses and not sampled else [self.fixed]:
                self._step(size, sampled, depth)
            if self.chooses and self.model.head is not None:
                self._fill(size)
            if progress is not None:
                progress(done, len(sizes))

    def choose_by(self, costs: StepCosts, priors: Mapping[str, Seq[float]]) -> None:
        """Choose the depth of every step by the costs of whole steps, of which `rehearsal.measure_steps` has some;
        `priors`: chances by place, where there are any for this drafter."""
        self.depths = ChosenDepth(costs, self.arm, self.most, self.fixed, priors.get(self.arm))

    def runner(self, ways: Ways) -> DeviceRunner:
        """What runs requests with this target's step; one at a time."""
        return DeviceRunner(self, ways)

    def run(
        self, sequences: Iterable[Sequence], clock: Clock | None = None, progress: Progress | None = None
    ) -> Generator[StepRecord, None, None]:
        """Decode all sequences and yield every step of every sequence: `engine.runner.run` for this target."""
        return drain(self.runner(Ways(clock, progress)), sequences)

    def plain(self) -> DeviceTarget:
        """Plain decoding over the same model and slots."""
        return DeviceTarget(self.model, "none", 0, size=self._size, chunk=self.chunk)

    def score(self, tokens: Seq[int]) -> Tensor:
        """The logits after each of the tokens, [T, V] float32; uses slot 0."""
        hidden = torch.cat([part for _, part in self.reader.prefill(0, tokens)])
        return torch.cat([self.decoder.bulk_logits(part) for part in hidden.split(512)])

    def enter(self, sequence: Sequence) -> None:
        """Hand the slot, whose prompt has been read, to the step."""
        slot = sequence.slot
        self._requests.set(slot, sequence.params, sequence.limit)
        self._slots[slot] = slot
        self._waiting[slot] = 1
        if self._overwrite is not None:
            self._overwrite.start(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Let the step pass over the slot."""
        self._slots[sequence.slot] = -1
        self.depths.release(sequence)
        self.drafter.release(sequence)

    def launch(self, running: Seq[Sequence]) -> Flight:
        """Start a step for all of these, which are all that have entered and not left."""
        slots = [sequence.slot for sequence in running]
        size = next(size for size in sizes_of(self.slots) if size > max(slots))
        sampled = any(sequence.params.by_ratio for sequence in running)
        depth = self.depths.choose(running, size)
        if self.chooses and self.model.head is not None:
            self._make_room(slots, size, depth)
        step = self._step(size, sampled, depth)
        step.launch()
        return Flight(list(running), step.report, self.arm if depth else NoDrafter.name)

    def rehearse(self, size: int, context: int) -> None:
        """Put the first `size` slots behind so many tokens that mean nothing, for `replay`; `rest` comes after it."""
        progress = self.model.progress
        for slot in range(size):
            self._requests.set(slot, SamplingParams(), self.max_len)
            self._slots[slot] = slot
        progress.length[:size] = context
        progress.laned[:size] = context - 1
        progress.replay[:size] = 1

    def replay(self, size: int, depth: int) -> None:
        """A step of theirs whose outcome is not read."""
        self._step(size, False, depth).launch()

    def rest(self) -> None:
        """Empty all slots, whatever stands in them."""
        self._slots.fill_(-1)
        for slot in range(self.slots):
            self.model.prefill_cache.reset(slot)
            self.model.progress.start(slot, [0], None)

    def _make_room(self, slots: Seq[int], size: int, depth: int) -> None:
        """Fill the lanes of these slots until a step of so many draft tokens may follow; count what it leaves."""
        window = depth + 1
        most = self.most + 1 if depth else self.model.progress.hidden.shape[1] - window
        while any(self._waiting[slot] > most for slot in slots):
            self._fill(size).launch()
            for slot in slots:
                self._waiting[slot] = max(0, self._waiting[slot] - self.model.window)
        for slot in slots:
            self._waiting[slot] = window if depth else self._waiting[slot] + window

    def _step(self, size: int, sampled: bool, depth: int) -> DeviceStep:
        """The step for the first `size` slots, recorded on first use."""
        key = (size, sampled, depth)
        if key not in self.steps:
            taken = self.most + 1 if self.chooses else None
            self.steps[key] = self._recorded(
                DeviceStep(self.model, self._requests, self._slots[:size], self.arm, depth, sampled,
                           self._draft_head, self._overwrite, self._size, taken)
            )  # fmt: skip
        return self.steps[key]

    def _fill(self, size: int) -> LaneFill:
        """What fills the lanes of the first `size` slots, recorded on first use."""
        if size not in self.fills:
            self.fills[size] = self._recorded(LaneFill(self.model, self._slots[:size]))
        return self.fills[size]

    def _recorded(self, step: Recordable) -> Recordable:
        """The step, recorded where there is a GPU. Meanwhile no slot is in use; what is written all the same is put
        back."""
        if self._slots.is_cuda:
            touched = (self._slots, self.model.progress.laned)
            before = [tensor.clone() for tensor in touched]
            self._slots.fill_(-1)
            free, _ = torch.cuda.mem_get_info(self._slots.device)
            step.record()
            self.graph_bytes += max(0, free - torch.cuda.mem_get_info(self._slots.device)[0])
            for tensor, value in zip(touched, before, strict=True):
                tensor.copy_(value)
        return step


class Flight:
    """A step that was launched: what it will report, and about whom."""

    def __init__(self, running: Seq[Sequence], record: Tensor, source: str) -> None:
        self._running, self._source = running, source
        self._landed: torch.cuda.Event | None = None
        if record.is_cuda:
            self._record = torch.empty(record.shape, dtype=record.dtype, pin_memory=True)
            self._record.copy_(record, non_blocking=True)
            self._landed = torch.cuda.Event()
            self._landed.record()
        else:
            self._record = record.clone()

    def land(self, failed: Failed) -> list[StepRecord]:
        """Wait for the step and say what it did to the sequences that were still running. `failed` is told of a
        sequence whose logits cannot be used, with a NumericalError naming their position; it has no record."""
        if self._landed is not None:
            self._landed.synchronize()
        rows, records = self._record.tolist(), []
        for sequence in self._running:
            if sequence.finish_reason is not None:
                continue
            *drafts, accepted, token, flags, position = rows[sequence.slot]
            if flags & ((2 << accepted) - 1):
                row = (flags & -flags).bit_length() - 1
                what = f"logits at position {position + row}: expected finite numbers, found NaN or inf"
                failed(sequence, NumericalError(what))
                continue
            length = drafts.index(-1) if -1 in drafts else len(drafts)
            length = max(0, min(length, sequence.limit - position - 1))  # the kernel judges none behind the limit
            emitted = sequence.extend((*drafts[:accepted], token))
            draft = Draft(tuple(drafts[:length]), source=self._source)
            records.append(StepRecord(sequence, position, draft, Verdict(accepted, token), emitted))
        return records


class DeviceRunner(Runner):
    """Runs requests by the device's step. Up to `AHEAD` steps are in flight, so that the device never waits for the
    host; whoever is in them and ends meanwhile is passed over when they land. All work is in one stream: a slot that
    changes hands, or whose prompt is being read, is not touched by steps launched before or without it."""

    def __init__(self, target: DeviceTarget, ways: Ways) -> None:
        super().__init__(target.slots, ways)
        self._target, self._prefixes = target, ways.prefixes
        self._flights: deque[Flight] = deque()

    def _choose(self, sequence: Sequence, drafter: Drafter | None) -> None:
        own = self._target.drafter
        if drafter is not None and drafter is not own:
            raise InputError(f"drafter: expected the one in the device's step, {own.name!r}, found {drafter.name!r}")
        if sequence.params.by_ratio:
            self._target.warm_up(sampled=True)

    def _forget(self, sequence: Sequence) -> None:
        """Nothing was noted."""

    def _read(self, sequence: Sequence) -> Iterator[int]:
        return self._target.reader.read(sequence, self._prefixes)

    def _enter(self, sequence: Sequence) -> None:
        self._target.enter(sequence)

    def _advance(self) -> None:
        if self._running:
            self._flights.append(self._target.launch(self._running))
        if not self._flights or not (len(self._flights) >= AHEAD or not self._running or self._prompts.waiting):
            return  # at once while requests wait for a slot, which an ending may free
        failed: dict[Sequence, Exception] = {}
        records = self._flights.popleft().land(failed.setdefault)
        self._events += records
        for record in records:
            self._target.depths.landed(record)
        for sequence in list(self._running):
            if sequence.finish_reason is not None or sequence in failed:
                self._let_go(sequence, "error", failed.get(sequence))

    def _leave(self, sequence: Sequence) -> None:
        self._target.leave(sequence)


def sizes_of(slots: int) -> Iterator[int]:
    """Batch sizes that have a step of their own: powers of two, and all slots."""
    size = 1
    while size < slots:
        yield size
        size *= 2
    yield slots
