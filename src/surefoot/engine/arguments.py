"""Where a model runs and in which numbers, as callers name it."""

from __future__ import annotations

import torch

from surefoot.engine.loaded import takes_eight_bits
from surefoot.errors import InputError, shown

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHTS = ("whole", "fp8")  # as the checkpoint has them, or those of linear layers in 8 bits


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    """The torch dtype of a name, or the dtype itself. Raises InputError for one that is not supported."""
    if isinstance(name, torch.dtype):
        name = str(name).removeprefix("torch.")
    if not isinstance(name, str) or name not in DTYPES:
        raise InputError(f"dtype: expected one of {', '.join(DTYPES)}, found {shown(name)}")
    return DTYPES[name]


def check_weights(weights: object, device: torch.device) -> None:
    """Raise InputError unless the device takes weights of this kind, one of `WEIGHTS`."""
    if not isinstance(weights, str) or weights not in WEIGHTS:
        raise InputError(f"weights: expected one of {', '.join(WEIGHTS)}, found {shown(weights)}")
    if weights == "fp8" and not takes_eight_bits(device):
        raise InputError("weights: expected fp8 only on a GPU of compute capability 8.9 or above, with Triton, "
                         f"found device {device}")  # fmt: skip


def parse_device(name: str | torch.device) -> torch.device:
    """A device that is there. Raises InputError otherwise."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device: expected 'cpu', 'cuda' or 'cuda:N', found {shown(name)}") from error
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device: expected 'cpu', 'cuda' or 'cuda:N', found {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device: expected one of {torch.cuda.device_count()} CUDA devices, found {name!r}")
    return device
