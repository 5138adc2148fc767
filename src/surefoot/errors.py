"""Every error that Surefoot raises on purpose.

    SurefootError
    ├── InputError        an argument of the caller is wrong (also a ValueError)
    │   └── ClosedError   a service that was told to close is asked for more
    ├── CheckpointError   a checkpoint's files do not hold what they must
    ├── TokenizerError    text was given or asked for and there is no tokenizer for it
    ├── QueueFullError    as many requests wait as may wait; later there will be room
    └── NumericalError    a model produced values that cannot be used, NaN logits for example

Messages name the thing, what was expected, and what was found.
"""

from __future__ import annotations


class SurefootError(Exception):
    """Base of all errors raised on purpose."""


class InputError(SurefootError, ValueError):
    """An argument is wrong; nothing was changed."""


class ClosedError(InputError):
    """A service takes no further requests."""


class CheckpointError(SurefootError):
    """A checkpoint is missing, malformed, or not what its config says."""


class TokenizerError(SurefootError):
    """Text was given or asked for and the model has no tokenizer."""


class QueueFullError(SurefootError):
    """As many requests are waiting as may wait."""


class NumericalError(SurefootError):
    """A model produced values that cannot be used."""


def shown(value: object, limit: int = 200) -> str:
    """A found value for a message: its repr, cut, whatever the value is."""
    try:
        text = repr(value)
    except Exception:  # an integer of very many digits, or a repr of the caller's own
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= limit else text[:limit] + "..."
