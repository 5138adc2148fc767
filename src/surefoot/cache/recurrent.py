"""State of one Gated DeltaNet layer: the recurrent state S and the last inputs of the convolution.

Neither can be cut to a length, so a verify window is kept open: the state advances for good over the window's first
token only (that one was emitted before), the draft tokens run on a second copy, and the window's small inputs stay on
a tape. `settle(keep)` then makes the state that of the kept tokens: it takes the second copy if all were kept, and
else applies the kept ones from the tape, operation for operation as the window did. No state is copied per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.kernels.gated_delta import Tape

MAX_WINDOW = 64  # tokens of a verify window
STRIP_ROWS = 2 * MAX_WINDOW  # rows of convolution input before the strip starts over


class RecurrentCache:
    """Per slot: `state` [Hk, Dk, r * Dv] float32, the same once more for drafts, and a strip of raw convolution
    inputs [rows, C] in which the committed past moves forward by an offset."""

    def __init__(self, slots: int, state_shape: tuple[int, int, int], channels: int, conv_width: int,
                 device: torch.device) -> None:  # fmt: skip
        self.state = [torch.zeros(state_shape, device=device) for _ in range(slots)]
        self.ahead = [torch.zeros(state_shape, device=device) for _ in range(slots)]
        self._strip = [torch.zeros(STRIP_ROWS, channels, device=device) for _ in range(slots)]
        self._offset = [0] * slots
        self._past = conv_width - 1
        self._tape: list[Tape | None] = [None] * slots

    @property
    def bytes_per_slot(self) -> int:
        """Memory of one sequence's two states and its strip."""
        return 2 * self.state[0].nbytes + self._strip[0].nbytes

    def reset(self, slot: int) -> None:
        """An empty sequence: no state, zeros before the first convolution input."""
        self.state[slot].zero_()
        self._tape[slot] = None
        self._offset[slot] = 0
        self._strip[slot][: self._past].zero_()

    def read_state(self, slot: int) -> Tensor:
        """The settled state [Hk, Dk, r * Dv] (not a copy)."""
        return self.state[slot]

    def write_state(self, slot: int, state: Tensor) -> None:
        """Replace it."""
        self.state[slot] = state

    def conv_past(self, slot: int) -> Tensor:
        """The last conv_width - 1 committed inputs [conv_width - 1, C], oldest first (a view)."""
        offset = self._offset[slot]
        return self._strip[slot][offset : offset + self._past]

    def open_strip(self, slot: int, inputs: Tensor) -> Tensor:
        """Append the window's inputs [n, C] after the committed past; returns both, [conv_width - 1 + n, C]. Rows
        behind the window (padding) do no harm: they are never kept."""
        stop = self._offset[slot] + self._past + inputs.shape[0]
        if stop > STRIP_ROWS:
            self.set_past(slot, self.conv_past(slot).clone())
            stop = self._past + inputs.shape[0]
        strip = self._strip[slot]
        strip[stop - inputs.shape[0] : stop] = inputs
        return strip[self._offset[slot] : stop]

    def set_past(self, slot: int, rows: Tensor) -> None:
        """Start the strip over with these committed inputs [conv_width - 1, C]."""
        self._offset[slot] = 0
        self._strip[slot][: self._past] = rows

    def open_window(self, slot: int, tape: Tape) -> None:
        """The window whose tape this is has run; its drafts await `settle`."""
        self._tape[slot] = tape

    def settle(self, slot: int, keep: int) -> None:
        """Keep the open window's first `keep` tokens (at least one) and forget the others."""
        tape = self._tape[slot]
        if tape is None:
            return
        self._tape[slot] = None
        self._offset[slot] += keep
        if keep == 1:
            return
        if keep == len(tape):
            self.state[slot], self.ahead[slot] = self.ahead[slot], self.state[slot]
        else:
            tape.replay_(self.state[slot], 1, keep)

    def snapshot(self, slot: int) -> tuple[Tensor, Tensor]:
        """Copies of the settled state and of the convolution's past."""
        return self.state[slot].clone(), self.conv_past(slot).clone()

    def restore(self, slot: int, snapshot: tuple[Tensor, Tensor]) -> None:
        """Return to a snapshot."""
        self._tape[slot] = None
        self.state[slot].copy_(snapshot[0])
        self.set_past(slot, snapshot[1])
