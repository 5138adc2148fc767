"""Where a prompt comes from: an argument, a file, standard input, or token ids."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from surefoot.cli.files import decode, read_text
from surefoot.errors import InputError, shown

if TYPE_CHECKING:
    from surefoot.cli.options import PromptOptions


def read_prompt(options: PromptOptions) -> str | list[int]:
    """The prompt as text or token ids, exactly as given (a file's last newline included).

    Without any source, standard input is read if something is piped into it. Raises InputError if there is no prompt,
    more than one, or it is not UTF-8 text.
    """
    given = [
        name
        for name, value in [("PROMPT", options.prompt), ("--file", options.file), ("--token-ids", options.token_ids)]
        if value is not None
    ]
    if len(given) > 1:
        raise InputError(f"prompt: expected one source, found {' and '.join(given)}")
    if options.token_ids is not None:
        return _ids(options.token_ids)
    if options.file is not None:
        text = read_text(options.file)
    elif options.prompt is not None and options.prompt != "-":
        text = options.prompt
    elif options.prompt == "-" or not sys.stdin.isatty():
        text = decode(sys.stdin.buffer.read(), "standard input")
    else:
        raise InputError("prompt: expected a text, --file, --token-ids or piped input, found none")
    if not text:
        raise InputError("prompt: expected at least one character, found none")
    return text


def _ids(listed: str) -> list[int]:
    try:
        return [int(part) for part in listed.replace(",", " ").split()]
    except ValueError:
        raise InputError(f"--token-ids: expected integers such as 5,17,3, found {shown(listed)}") from None
