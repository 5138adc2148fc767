"""Rich's console on standard output, ending as the other commands do when the reader goes away."""

from __future__ import annotations

import sys

from rich.console import Console

PAGE = 160  # columns where nobody said how many there are


class OutputConsole(Console):
    """Prints to standard output, in colour on a terminal; never cuts lines."""

    def __init__(self) -> None:
        super().__init__(file=sys.stdout, highlight=False, soft_wrap=True)
        if not self.is_terminal:
            self.width = PAGE

    def on_broken_pipe(self) -> None:
        """Rich would end the process here with a code of its own; `surefoot.cli.main` does that for all commands."""
        raise BrokenPipeError
