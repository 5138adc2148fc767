"""Files that options name."""

from __future__ import annotations

from pathlib import Path

from surefoot.errors import InputError


def read_text(file: Path) -> str:
    """A file's text. Raises InputError if it cannot be read or is none."""
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file}: expected a readable file, found: {error.strerror or error}") from error
    return decode(raw, str(file))


def decode(raw: bytes, source: str) -> str:
    """UTF-8 text. Raises InputError, naming the source, for anything else."""
    if b"\0" in raw:
        raise InputError(f"{source}: expected text, found binary data (a NUL at byte {raw.index(0)})")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{source}: expected UTF-8 text, found: {error}") from error


def check_writable(name: str, file: Path) -> None:
    """Raise InputError, naming the option, unless a file can be written there."""
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise InputError(f"{name}: expected a file in a folder that is there, found {file}")
