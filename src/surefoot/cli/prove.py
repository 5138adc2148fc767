"""`surefoot prove`: the user's own proof, to the terminal and to files."""

from __future__ import annotations

from surefoot.bench.prompts import read_prompts
from surefoot.cli.console import OutputConsole
from surefoot.cli.files import check_writable
from surefoot.cli.options import ProveOptions, listed
from surefoot.cli.progress import LateBar
from surefoot.errors import NumericalError
from surefoot.prove.run import prove
from surefoot.prove.settings import Settings
from surefoot.prove.show import renderables, write_page


def run_prove(options: ProveOptions) -> None:
    """Check what was asked for, prove, print, save. Raises NumericalError if anything failed."""
    settings = settings_of(options)
    for name, file in (("--json", options.json), ("--html", options.html)):
        if file is not None:
            check_writable(name, file)
    with LateBar("loading", "proving") as bar:
        report = prove(settings, bar)
    console = OutputConsole()
    for part in renderables(report):
        console.print(part)
    if options.json is not None:
        report.save(options.json)
    if options.html is not None:
        write_page(report, options.html)
    if not report.passed:
        raise NumericalError(f"prove: expected every check to hold, found {len(report.failures)} that do not")


def settings_of(options: ProveOptions) -> Settings:
    """The settings that the options spell. Raises InputError."""
    prompts = None
    if options.prompts is not None:
        prompts = tuple(text for texts in read_prompts(options.prompts).values() for text in texts)
    return Settings(
        model=options.model, device=options.device, dtype=options.dtype, prompts=prompts,
        drafters=listed("--drafters", options.drafters, str), max_k=options.max_k, tokens=options.tokens,
        seed=options.seed, quick=options.quick,
    )  # fmt: skip
