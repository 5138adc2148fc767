"""The caches of a decode step that runs on the device alone, and the numbers that steer it.

A step reads where each sequence stands from `length` and writes it there; the host writes these numbers only when a
sequence starts. So a step can be recorded once and replayed. Prefill, which the host drives, sees the same memory
through `PrefillCache`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.cache.kv import KVCache
from surefoot.kernels.fused.delta import DeltaState


@dataclass(frozen=True)
class Progress:
    """Per slot, int32: `tokens` [S, L] prompt and output; `length` [S], how many of them the target has read (the
    token at that index is the last emitted one); `replay` [S], how many of the last window's tokens the recurrent
    states have yet to take in; `laned` [S], how many positions the MTP head's lane holds, those up to `length` being
    yet to come. `hidden` [S, 2^n, H] float32: post-norm states, that of position p in row p mod 2^n; there is room for
    two windows."""

    tokens: Tensor
    length: Tensor
    replay: Tensor
    laned: Tensor
    hidden: Tensor

    @classmethod
    def allocate(cls, slots: int, max_len: int, window: int, hidden: int, device: torch.device) -> Progress:
        """Empty slots for sequences of at most `max_len` tokens and windows of at most `window`."""

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(slots, *shape, dtype=torch.int32, device=device)

        rows = 1 << (2 * window - 1).bit_length()
        return cls(numbers(max_len + window), numbers(), numbers(), numbers(),
                   torch.zeros(slots, rows, hidden, device=device))  # fmt: skip

    def start(self, slot: int, tokens: Seq[int], hidden: Tensor | None) -> None:
        """The target has read all of the prompt but its last token; `hidden` [H] is its post-norm state behind it (None
        if it has read nothing)."""
        device = self.tokens.device
        self.tokens[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32).to(device)
        self.length[slot] = len(tokens) - 1
        self.replay[slot] = 0
        self.laned[slot] = behind = max(0, len(tokens) - 2)  # the last state's place in the lane waits for its token
        if hidden is not None:
            self.hidden[slot, behind % self.hidden.shape[1]] = hidden


class DeltaSlots:
    """A recurrent layer as prefill sees it: state and convolution inputs of the tokens read so far."""

    def __init__(self, device_state: DeltaState, conv_width: int) -> None:
        self.device_state = device_state
        slots, _, channels = device_state.ring.shape
        self._past = torch.zeros(slots, conv_width - 1, channels, device=device_state.ring.device)

    @property
    def bytes_per_slot(self) -> int:
        """Memory of one sequence's state, tape and ring."""
        own = vars(self.device_state).values()
        return int(sum(tensor.nbytes for tensor in own)) // len(self._past)

    def reset(self, slot: int) -> None:
        """An empty sequence."""
        self.device_state.state[slot].zero_()
        self._past[slot].zero_()

    def conv_past(self, slot: int) -> Tensor:
        """The last conv_width - 1 inputs [conv_width - 1, C], oldest first."""
        return self._past[slot]

    def set_past(self, slot: int, rows: Tensor) -> None:
        """Replace them."""
        self._past[slot] = rows

    def read_state(self, slot: int) -> Tensor:
        """The recurrent state [Hk, Dk, r * Dv]."""
        return self.device_state.state[slot]

    def write_state(self, slot: int, state: Tensor) -> None:
        """Replace it."""
        self.device_state.state[slot] = state

    def fill_ring(self, slot: int, rows: Tensor) -> None:
        """Put the last inputs where the decode step looks for them: `rows` [conv_width - 1] of the ring."""
        self.device_state.ring[slot].index_copy_(0, rows, self._past[slot].to(self.device_state.ring.dtype))


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt whose tokens but the last a slot has read: the recurrent layers' states and past inputs behind them, and
    the last hidden state [H] (None for a prompt of one token). Keys and values still stand in the slot."""

    tokens: list[int]
    states: list[tuple[Tensor, Tensor]]
    hidden: Tensor | None


class PrefillCache:
    """What `Decoder.prefill` needs of a cache, over the device's memory."""

    def __init__(self, layers: list[KVCache | DeltaSlots], slots: int, conv_width: int) -> None:
        self.layers = layers
        self.length = [0] * slots
        self._past = conv_width - 1
        self._keeps = False
        self._kept: dict[int, ReadPrompt] = {}

    @property
    def bytes_per_slot(self) -> int:
        """Memory of one sequence's place in all layers."""
        return sum(layer.bytes_per_slot for layer in self.layers)

    def reset(self, slot: int) -> None:
        """Empty the slot."""
        self.length[slot] = 0
        self._kept.pop(slot, None)
        for layer in self._recurrent():
            layer.reset(slot)

    def extend(self, slot: int, tokens: int) -> None:
        """`tokens` tokens were read."""
        self.length[slot] += tokens

    def keep_prompts(self) -> None:
        """From now on keep what each slot read last, so that the same prompt can be decoded again without reading it;
        takes the memory of a second recurrent state a slot."""
        self._keeps = True

    def keep(self, slot: int, tokens: list[int], hidden: Tensor | None) -> None:
        """The slot has read the prompt `tokens` but for its last token, `hidden` being the last state."""
        if self._keeps:
            states = [(layer.read_state(slot).clone(), layer.conv_past(slot).clone()) for layer in self._recurrent()]
            self._kept[slot] = ReadPrompt(list(tokens), states, None if hidden is None else hidden.clone())

    def recall(self, slot: int, tokens: list[int]) -> ReadPrompt | None:
        """The slot as it was behind the prompt, if that is the one it read last: what decoding wrote stands behind it
        and is overwritten."""
        kept = self._kept.get(slot)
        if kept is None or kept.tokens != tokens:
            return None
        for layer, (state, past) in zip(self._recurrent(), kept.states, strict=True):
            layer.write_state(slot, state)
            layer.set_past(slot, past)
        self.length[slot] = len(tokens) - 1
        return kept

    def finish(self, slot: int) -> None:
        """The prompt has been read: hand the slot over to the decode step."""
        for layer in self._recurrent():
            ring = layer.device_state.ring
            positions = torch.arange(self.length[slot] - self._past, self.length[slot], device=ring.device)
            layer.fill_ring(slot, positions % ring.shape[1])

    def _recurrent(self) -> list[DeltaSlots]:
        return [layer for layer in self.layers if isinstance(layer, DeltaSlots)]
