"""Numbers from outside, as arrays of any kind, to tensors that can be computed with."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from surefoot.errors import InputError


class _Array(Protocol):
    """Anything that NumPy understands as an array."""

    def __array__(self) -> object: ...


Array: TypeAlias = Tensor | _Array | Seq[int] | Seq[float] | Seq[Seq[float]]
"""A tensor, a NumPy array, or (nested) lists of numbers."""


def real_tensor(name: str, value: object, expected: str = "a rectangular array of numbers") -> Tensor:
    """A tensor of the real numbers given, in their own dtype where PyTorch has it and else in float64. Tensors are
    detached, all else is copied.

    Raises InputError saying what was `expected` for anything that is not a dense array of real numbers.
    """
    if isinstance(value, Tensor):
        check_dense(name, value, expected)
        return value.detach()
    kind = type(value).__name__
    try:
        array = np.asarray(value)
        kind = f"{kind} of {array.dtype}" if array.dtype.kind != "O" else kind
        # What can be a float has a method for it; NumPy would also read texts, and None as NaN.
        real = array.dtype.kind in "biuf" or (
            array.dtype.kind == "O" and array.ndim > 0 and all(hasattr(entry, "__float__") for entry in array.flat)
        )
        if not real:
            raise TypeError(f"no real numbers: {kind}")
        plain = array.dtype.kind != "O" and array.dtype.itemsize <= 8
        dtype = array.dtype.newbyteorder("=") if plain else np.dtype(np.float64)
        with np.errstate(over="ignore"):  # what is too large for float64 becomes infinite, and is judged as that
            return torch.from_numpy(np.array(array, dtype=dtype, order="C"))
    except OverflowError as error:
        raise InputError(f"{name}: expected {expected}, found an integer too large for one in {kind}") from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name}: expected {expected}, found {kind}") from error


def check_dense(name: str, tensor: Tensor, expected: str) -> None:
    """Raise InputError unless the tensor is one of real numbers in memory."""
    odd = tensor.is_complex() or tensor.is_meta or tensor.is_nested or tensor.is_quantized
    if odd or tensor.layout is not torch.strided:
        found = f"{tensor.dtype} in layout {tensor.layout} on {tensor.device}"
        raise InputError(f"{name}: expected {expected}, found a tensor of {found}")
