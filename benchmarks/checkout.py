"""This checkout, as the results name it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from surefoot.bench.machine import Machine, Watch, versions

ROOT = Path(__file__).parent.parent


def machine(watch: Watch) -> Machine:
    """The machine since the watch began, with the command and the checkout's commit, marked if files differ from it."""
    found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    installed = versions()
    ours = f"{installed.get('surefoot', 'not installed')} ({found.stdout.strip() or 'no commit known'})"
    return watch.machine(" ".join(["python", *sys.argv]), installed | {"surefoot": ours})
