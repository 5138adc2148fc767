"""`surefoot generate`: a prompt's continuation, and how it compares with plain decoding."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from surefoot.cli.options import Options
from surefoot.cli.session import Run, Session, TextStream
from surefoot.drafters.auto import AutoDrafter
from surefoot.engine.depths import ChosenDepth
from surefoot.engine.engine import Engine
from surefoot.engine.stats import Stats

WARM_UP_TOKENS = 8


def generate(options: Options) -> None:
    """Stream the text (or print JSON), then statistics on standard error."""
    session = Session.open(options)
    run = Run(session.engine, session.prompt, session.params)
    if options.as_json:
        print(json.dumps(run.finish().result() | {"settings": session.settings()}))
        return
    _stream(run)
    print(statistics(run), file=sys.stderr)


def compare(options: Options) -> bool:
    """Decode with the drafter and plainly on the same target; print both, and whether the tokens are the same ones.

    Returns whether what was promised held: equal tokens, unless rejection acceptance was asked for above temperature 0
    (which promises the distribution).
    """
    session = Session.open(options)
    drafted = session.engine
    plain = drafted.plain()
    short = replace(session.params, max_new_tokens=WARM_UP_TOKENS, min_new_tokens=0, ignore_eos=True, structured=None)
    for engine in (drafted, plain):  # first calls pay for allocations and thread pools
        Run(engine, session.prompt[-WARM_UP_TOKENS:], short).finish()
    fast = Run(drafted, session.prompt, session.params)
    slow = Run(plain, session.prompt, session.params)
    if options.as_json:
        fast.finish()
    else:
        _stream(fast)
    slow.finish()
    identical = fast.tokens == slow.tokens
    speed_up = fast.stats.tokens_per_second / slow.stats.tokens_per_second
    if options.as_json:
        comparison = {"plain": slow.result(), "speed_up": speed_up, "identical": identical}
        print(json.dumps(fast.result() | comparison | {"settings": session.settings()}))
    else:
        print(_comparison(session, fast.stats, slow.stats, speed_up, identical))
    return identical or session.params.by_ratio


def statistics(run: Run) -> str:
    """What came out, what drafting did, where the time went."""
    s = run.stats
    return "\n".join(
        [
            f"{_setting(run.engine)}: {s.tokens} tokens in {s.steps} steps ({s.tokens_per_step:.2f} per step), "
            f"{s.tokens_per_second:.1f} tokens/s, ended by {run.finish_reason}",
            _acceptance(s),
            *_choices(run.engine),
            f"prefill {len(run.prompt)} tokens {s.prefill_s:.3f} s; decode {s.decode_s:.3f} s: "
            f"draft {s.draft_s:.3f}, verify {s.verify_s:.3f}, commit {s.commit_s:.3f}",
        ]
    )


def _stream(run: Run) -> None:
    stream = TextStream(run)
    for step in run:
        sys.stdout.write(stream.push(step.record.tokens))
        sys.stdout.flush()
    sys.stdout.write(stream.flush() + "\n")
    sys.stdout.flush()


def _comparison(session: Session, fast: Stats, slow: Stats, speed_up: float, identical: bool) -> str:
    name = _setting(session.engine)
    width = max(len(name), len("plain"))
    lines = [
        "",
        f"{'plain':{width}}  {slow.tokens_per_second:8.1f} tokens/s  ({slow.tokens} tokens, {slow.decode_s:.2f} s)",
        f"{name:{width}}  {fast.tokens_per_second:8.1f} tokens/s  ({fast.tokens} tokens, {fast.decode_s:.2f} s, "
        f"{fast.tokens_per_step:.2f} tokens per step)",
        _acceptance(fast),
        f"speed-up {speed_up:.2f}x",
        f"identical tokens: {'yes' if identical else 'no'}",
    ]
    return "\n".join(lines)


def _setting(engine: Engine) -> str:
    name = engine.drafter.name
    return name if name == "none" else f"{name}, K = {engine.draft_length}"


def _choices(engine: Engine) -> list[str]:
    """What a drafter that chooses has chosen so far, or a device's target that does."""
    chooser = getattr(engine.target, "depths", engine.drafter)
    if not isinstance(chooser, (AutoDrafter, ChosenDepth)):
        return []
    steps: dict[str, list[int]] = {}
    for (arm, depth), count in sorted(chooser.choices.items()):
        steps.setdefault(arm.split("-")[0], []).extend([depth] * count)
    arms = [f"{arm} at {len(d)}" + (f" ({sum(d) / len(d):.1f} tokens)" if any(d) else "") for arm, d in steps.items()]
    return [f"chosen: {', '.join(arms)} steps; {chooser.probed} of them to learn"]


def _acceptance(stats: Stats) -> str:
    if not stats.proposed:
        return "nothing was drafted"
    pairs = zip(stats.accepted_by_position, stats.proposed_by_position, strict=True)
    shares = " ".join(f"{accepted / proposed:.0%}" for accepted, proposed in pairs if proposed)
    total = f"accepted {stats.accepted} of {stats.proposed} draft tokens ({stats.acceptance_rate:.0%})"
    return f"{total}; by draft position: {shares}"
