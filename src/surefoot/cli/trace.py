"""`surefoot trace`: what each step drafted, what became of it, and what it cost."""

from __future__ import annotations

import json
import sys
from typing import Any

from surefoot.cli.console import OutputConsole
from surefoot.cli.generate import statistics
from surefoot.cli.options import Options
from surefoot.cli.session import Run, Session, Step
from surefoot.cli.steps import render, token_shower


def trace(options: Options) -> None:
    """Print every step as it is made (in colour on a terminal), or all of them as one JSON object."""
    session = Session.open(options)
    run = Run(session.engine, session.prompt, session.params)
    if options.as_json:
        steps = [_step_dict(step) for step in run]
        print(json.dumps(run.result() | {"steps": steps, "settings": session.settings()}))
        return
    show = token_shower(session.engine.tokenizer)
    console = OutputConsole()
    for number, step in enumerate(run, start=1):
        console.print(render(step.record, number, _seconds(step), show))
    print(statistics(run), file=sys.stderr)


def _seconds(step: Step) -> str:
    parts = (f"{name} {step.seconds[name + '_s'] * 1000:.1f} ms" for name in ("draft", "verify"))
    return "  " + "  ".join(parts)


def _step_dict(step: Step) -> dict[str, Any]:
    record = step.record
    return {
        "position": record.position,
        "cache_length": record.position - 1 + record.emitted,
        "drafter": record.draft.source,
        "draft": list(record.draft.tokens),
        "accepted": record.accepted,
        "emitted": list(step.record.tokens),
        "seconds": step.seconds,
    }
