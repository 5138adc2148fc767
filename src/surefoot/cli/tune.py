"""`surefoot tune`: a table by kind of prompt, and a profile for `--drafter auto`."""

from __future__ import annotations

from rich.table import Table

from surefoot.bench.plot import require_matplotlib
from surefoot.bench.prompts import read_prompts
from surefoot.bench.tune import AUTO, Tuned, best_fixed, draw, some_kinds, tune
from surefoot.cli.console import OutputConsole
from surefoot.cli.files import check_writable
from surefoot.cli.options import TuneOptions, listed
from surefoot.cli.progress import LateBar
from surefoot.engine.arguments import parse_device, parse_dtype
from surefoot.engine.drafting import check_draft_length
from surefoot.engine.loaded import LoadedModel
from surefoot.errors import InputError
from surefoot.sampling import require_int


def run_tune(options: TuneOptions) -> None:
    """Check what was asked for, measure, print, save."""
    device, dtype = parse_device(options.device), parse_dtype(options.dtype)
    depths = listed("--depths", options.depths, int)
    for depth in depths:
        check_draft_length("mtp", depth, device)
    require_int("tokens", options.tokens, low=2)
    require_int("rounds", options.rounds, low=1)
    named = listed("--kinds", options.kinds, str)
    if options.prompts is not None and named:
        raise InputError("--kinds: expected without --prompts, found both")
    prompts = some_kinds(named) if options.prompts is None else read_prompts(options.prompts)
    for name, file in (("--json", options.json), ("--plot", options.plot)):
        if file is not None:
            check_writable(name, file)
    if options.plot is not None:
        require_matplotlib()
    with LateBar("loading") as bar:
        model = LoadedModel.from_checkpoint(
            options.model, device=device, dtype=dtype, max_len=options.max_len, mtp="if-present", progress=bar
        )
    with LateBar("kinds of prompts") as bar:
        tuned = tune(options.label, model, prompts, options.command, depths=depths, tokens=options.tokens,
                     rounds=options.rounds, progress=bar)  # fmt: skip
    console = OutputConsole()
    console.print(table_of(tuned))
    fixed = best_fixed(tuned.cells)
    console.print(f"lossless: every way gave plain decoding's tokens. The best one way for all: {fixed.name}.")
    console.print(f"--drafter auto starts from this now: {tuned.file.name}, in the cache folder of surefoot")
    if options.json is not None:
        tuned.save(options.json)
    if options.plot is not None:
        draw(tuned, options.plot)


def table_of(tuned: Tuned) -> Table:
    """Kinds down, ways across: times plain decoding as measured, and in brackets as foretold."""
    names = list(dict.fromkeys(cell.name for cell in tuned.cells))
    table = Table(title=f"{tuned.model}: times plain decoding, measured (foretold)")
    table.add_column("kind")
    for name in names:
        table.add_column("plain, tokens/s" if name == names[0] else name, justify="right")
    for kind in dict.fromkeys(cell.kind for cell in tuned.cells):
        cells = {cell.name: cell for cell in tuned.cells if cell.kind == kind}
        best = max(cells.values(), key=lambda cell: cell.to_plain)
        row = [f"{cells[names[0]].tokens_per_second.median:.1f}"]
        for name in names[1:]:
            cell = cells[name]
            told = "" if cell.drafter == AUTO else f" ({cell.foretold:.2f})"
            text = f"{cell.to_plain:.2f}{told}"
            row.append(f"[bold]{text}[/bold]" if cell is best else text)
        table.add_row(kind, *row)
    return table
