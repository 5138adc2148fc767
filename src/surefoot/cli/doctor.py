"""`surefoot doctor`: options to settings, a report to the terminal."""

from __future__ import annotations

import json

from rich.console import Console

from surefoot.cli.console import OutputConsole
from surefoot.cli.files import read_text
from surefoot.cli.options import DoctorOptions
from surefoot.doctor.examine import Settings, examine
from surefoot.doctor.show import renderables
from surefoot.engine.arguments import parse_device, parse_dtype
from surefoot.loading.files import find_model


def doctor(options: DoctorOptions) -> bool:
    """Examine and print; whether no error was found."""
    settings = Settings(
        probe=options.probe,
        text=None if options.text is None else read_text(options.text),
        tokens=options.tokens,
        depth=options.depth,
    )
    device, dtype = parse_device(options.device), parse_dtype(options.dtype)
    folder = find_model(options.model)
    with Console(stderr=True).status("reading files") as status:  # drawn on terminals only
        report = examine(folder, settings, device, dtype, status.update, options.model)
    if options.as_json:
        print(json.dumps(report.as_json()))
        return report.sound
    console = OutputConsole()
    for part in renderables(report):
        console.print(part)
    return report.sound
