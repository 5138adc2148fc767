"""What a GPU does in a step, kernel by kernel; and that no step's launch waits for it.

    python benchmarks/trace.py --shape qwen3.5-9b --drafter mtp --depth 3
    python benchmarks/trace.py --batch 8 --steps 50 --json runs/trace.json --trace runs/trace-events.json

Profiles steps in the middle of a generation. While a step is launched torch is told to fail at anything that waits
(`torch.cuda.set_sync_debug_mode`), and the profile may show neither a synchronising call there nor, anywhere in the
steps, a copy from or to memory that is not pinned. Exits with code 1 otherwise. The host waits outside launches, for
the report of the step before. `--trace` saves the events for a trace viewer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import checkout
from surefoot import Engine, SamplingParams
from surefoot.bench.machine import Watch
from surefoot.bench.prompts import random_prompts
from surefoot.bench.run import load_model
from surefoot.bench.settings import Settings
from surefoot.engine.arguments import DTYPES, WEIGHTS
from surefoot.engine.hardware import device_name
from surefoot.errors import InputError
from surefoot.loading.shapes import SHAPES
from surefoot.sequence import Sequence

if TYPE_CHECKING:
    from surefoot.engine.device import DeviceTarget

LAUNCH = "surefoot: launch of a step"  # its name in the profile
WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy",
           "cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize")  # fmt: skip
WARM_UP = 8  # steps before those that count


@dataclass(frozen=True)
class Event:
    """Of a profile; times in microseconds."""

    name: str
    start: float
    end: float
    on_device: bool


@dataclass(frozen=True)
class Kernel:
    """All calls of one kernel, or one kind of copy, in the steps."""

    name: str
    calls: int
    total_us: float
    share: float


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="surefoot-demo", help="a bundled name, a folder, or a hub id")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights of a published shape instead")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--weights", choices=WEIGHTS, default="whole")
    parser.add_argument("--drafter", choices=("none", "ngram", "mtp", "mtp+ngram", "auto"), default="mtp")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--draft-vocab", type=int, help="tokens that the MTP head drafts among")
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, help="save the table here")
    parser.add_argument("--trace", type=Path, help="save all events here, for a trace viewer")
    args = parser.parse_args()
    for name in ("steps", "batch", "context"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: expected at least 1, found {getattr(args, name)}")
    return args


def guarded(launch: Callable[[], None], launched: list[None]) -> Callable[[], None]:
    """The launch, marked in the profile and counted; a wait inside raises RuntimeError."""

    def run() -> None:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with record_function(LAUNCH):
                launch()
        finally:
            torch.cuda.set_sync_debug_mode(before)
        launched.append(None)

    return run


def build(args: argparse.Namespace) -> DeviceTarget:
    """The model with its drafter in the step. Raises InputError where it has no such step."""
    if not torch.cuda.is_available():
        raise InputError("trace: expected a CUDA device, found none")
    depth = 0 if args.drafter == "none" else args.depth
    settings = Settings(
        model=None if args.shape else args.model, shape=args.shape, device=args.device, dtype=args.dtype,
        weights=args.weights, context=args.context, tokens=new_tokens(args), depths=(args.depth,),
    )  # fmt: skip
    model = load_model(settings, lambda done, total: None)
    target = Engine.over(
        model, drafter=args.drafter, draft_length=depth, slots=args.batch, draft_vocab=args.draft_vocab
    ).target
    from surefoot.engine.device import DeviceTarget  # needs Triton

    if not isinstance(target, DeviceTarget):
        raise InputError("trace: expected a model whose step runs on the GPU alone, found one for the host's loop")
    return target


def new_tokens(args: argparse.Namespace) -> int:
    """Room for all steps, whatever is accepted."""
    return int((args.steps + WARM_UP + 8) * (args.depth + 1))


def record(target: DeviceTarget, args: argparse.Namespace) -> list[Event]:
    """The events of so many steps."""
    launched: list[None] = []
    for step in target.steps.values():
        step.launch = guarded(step.launch, launched)
    for fill in target.fills.values():
        fill.launch = guarded(fill.launch, [])
    params = SamplingParams(max_new_tokens=new_tokens(args), temperature=args.temperature, ignore_eos=True)
    prompts = random_prompts(target.vocab_size, args.batch, args.context)
    records = target.run([Sequence(0, prompt, params, len(prompt) + params.max_new_tokens) for prompt in prompts])
    while len(launched) < WARM_UP:
        next(records)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        launched.clear()
        while len(launched) < args.steps:
            next(records)
        torch.cuda.synchronize()
    records.close()
    if args.trace is not None:
        profiler.export_chrome_trace(str(args.trace))
    return [
        Event(event.name, event.time_range.start, event.time_range.end, event.device_type.name == "CUDA")
        for event in profiler.events() or ()
    ]


def problems(events: Seq[Event], steps: int) -> list[str]:
    """What must not be in a profile of so many steps: calls that wait inside a launch, copies from or to memory that is
    not pinned. Missing launches, too: a profile without them would say nothing."""
    launches = [event for event in events if event.name == LAUNCH and not event.on_device]
    found = [] if len(launches) == steps else [f"expected {steps} launches in the profile, found {len(launches)}"]
    for event in events:
        if event.on_device:
            if "Pageable" in event.name:
                found.append(f"{event.name} between two steps")
        elif event.name in WAITING and any(launch.start <= event.start < launch.end for launch in launches):
            found.append(f"{event.name} inside a launch")
    return found


def kernels(events: Seq[Event]) -> list[Kernel]:
    """What ran on the device, the longest in all first. The mark of a launch, which profilers repeat there, is none."""
    own = [event for event in events if event.on_device and event.name != LAUNCH]
    total = sum(event.end - event.start for event in own)
    names = dict.fromkeys(event.name for event in own)
    spent = {name: [event.end - event.start for event in own if event.name == name] for name in names}
    rows = [Kernel(name, len(each), sum(each), sum(each) / total) for name, each in spent.items()]
    return sorted(rows, key=lambda row: row.total_us, reverse=True)


def table(rows: Seq[Kernel], steps: int) -> str:
    """One line a kernel."""
    lines = [f"{'kernel':60} {'calls':>7} {'total us':>10} {'us a step':>10} {'us a call':>10} {'share':>6}"]
    for row in rows:
        lines.append(f"{row.name[:60]:60} {row.calls:7} {row.total_us:10.1f} {row.total_us / steps:10.2f} "
                     f"{row.total_us / row.calls:10.2f} {row.share:6.1%}")  # fmt: skip
    total = sum(row.total_us for row in rows)
    return "\n".join([*lines, f"{'all':60} {sum(row.calls for row in rows):7} {total:10.1f} {total / steps:10.2f}"])


def main() -> None:
    args = parse_args()
    watch = Watch()
    try:
        with torch.inference_mode():
            events = record(build(args), args)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        raise SystemExit(f"a step's launch waited for the device: {error}") from error
    rows, wrong = kernels(events), problems(events, args.steps)
    print(table(rows, args.steps))
    print(f"{args.steps} steps: " + ("; ".join(wrong) if wrong else "no launch waited, nothing was copied unpinned"))
    if args.json is not None:
        config = {**vars(args), "model": None if args.shape else Path(args.model).name, "json": None, "trace": None}
        saved = {"problems": wrong, "config": config, "device": device_name(torch.device(args.device)),
                 "machine": asdict(checkout.machine(watch)), "kernels": [asdict(row) for row in rows]}  # fmt: skip
        args.json.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
