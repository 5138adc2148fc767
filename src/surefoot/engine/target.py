"""The Qwen3.5-family target: a decoder and its hybrid cache behind the Target Protocol."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from surefoot.cache import KVCache
from surefoot.cache.hybrid import Snapshot
from surefoot.cache.prefix import StateLayer, keep_layers, resume_layers
from surefoot.errors import InputError
from surefoot.kernels.rows import rows_of_a_pass
from surefoot.model import Decoder, build_cache
from surefoot.model.spans import Layout, into_passes
from surefoot.types import Kept, Scores, Window

PREFILL_CHUNK = 256
CUDA_PREFILL_CHUNK = 4096


def prefill_chunk(device: torch.device) -> int:
    """Tokens of a prompt that are read at once. On a CPU, few enough that activations stay near the caches. On a GPU,
    enough that a chunk's products are bound by arithmetic many times over (2 T flops a weight against 2 bytes: T beyond
    170 on an H200) and fill the card's tiles evenly; more would only take memory, of which a token of the chunk needs
    about 8 hidden + 6 ffn widths in bytes: 0.45 GB a chunk for the 9B shape, 0.6 GB for 27B."""
    return CUDA_PREFILL_CHUNK if device.type == "cuda" else PREFILL_CHUNK


class PromptCache(Protocol):
    """The caches that prompts are read into: those of the host's loop or of the device's step."""

    length: list[int]

    @property
    def layers(self) -> Seq[KVCache | StateLayer]:
        """One for each of the decoder's."""

    def reset(self, slot: int) -> None:
        """Empty the slot."""

    def extend(self, slot: int, tokens: int) -> None:
        """`tokens` tokens were read."""


def read_prompt(
    decoder: Decoder, cache: PromptCache, slot: int, tokens: Seq[int], chunk: int, kept: Seq[Kept] = ()
) -> Iterator[tuple[int, Tensor]]:
    """Read tokens a chunk at a time behind those that are put back; see `ResumableTarget.resume`."""
    if not kept or kept[0].start == 0:
        cache.reset(slot)
    if kept:
        resume_layers(cache.layers, slot, kept)
        cache.extend(slot, kept[-1].stop - kept[0].start)
    start = kept[-1].stop if kept else 0
    for position in range(start, len(tokens), chunk):
        yield position, decoder.prefill(tokens[position : position + chunk], cache, slot)


class DecoderTarget:
    """See `surefoot.types.Target` and `ResumableTarget`. All slots share one cache; a window's rows of all slots are
    one pass. Prompts are read in chunks of `chunk` tokens, as many as suit the device unless it is given; `max_len` is
    the decoder's unless it is given."""

    def __init__(self, decoder: Decoder, slots: int, chunk: int | None = None, max_len: int | None = None) -> None:
        self.decoder = decoder
        self.vocab_size = decoder.config.vocab_size
        self.max_len = decoder.max_len if max_len is None else max_len
        self.slots = slots
        self.chunk = prefill_chunk(decoder.device) if chunk is None else chunk
        self.cache = build_cache(decoder.config, slots, self.max_len, decoder.dtype, decoder.device)
        self._marks: dict[int, Snapshot] = {}

    def prefill(self, slot: int, tokens: Seq[int]) -> Iterator[tuple[int, Tensor]]:
        """Empty the slot and read the tokens into it, a chunk at a time."""
        return self.resume(slot, tokens, ())

    def keep(self, slot: int, start: int, stop: int) -> Kept:
        """Copy what was read from `start` on, and the states."""
        return keep_layers(self.cache.layers, slot, start, stop)

    def resume(self, slot: int, tokens: Seq[int], kept: Seq[Kept]) -> Iterator[tuple[int, Tensor]]:
        """`prefill` behind what was kept."""
        return read_prompt(self.decoder, self.cache, slot, tokens, self.chunk, kept)

    def verify(self, windows: Seq[Window]) -> list[Scores]:
        """Read every window and score its tokens."""
        limit = rows_of_a_pass(self.decoder.device)
        for window in windows:
            if limit is not None and len(window.tokens) > limit:
                raise InputError(f"window of slot {window.slot}: expected at most {limit} tokens on this device, "
                                 f"found {len(window.tokens)}")  # fmt: skip
            end = self.cache.length[window.slot] + len(window.tokens)
            if end > self.max_len:
                raise InputError(
                    f"window of slot {window.slot}: expected at most {self.max_len} positions, found {end}"
                )
        for window in windows:
            self.cache.open_window(window.slot, len(window.tokens))
        passes = into_passes(windows, [len(window.tokens) for window in windows], self.decoder.device)
        return [scores for part in passes for scores in self._score_pass(part)]

    def _score_pass(self, windows: Seq[Window]) -> list[Scores]:
        parts = [(w.slot, self.cache.length[w.slot], len(w.tokens)) for w in windows]
        layout = Layout.of(parts, self.decoder.device, self.decoder.linear.least_rows)
        hidden = self.decoder.decode([token for w in windows for token in w.tokens], self.cache, layout)
        logits = self.decoder.logits(hidden)
        return [Scores(logits[span.rows], hidden[span.rows]) for span in layout.spans]

    def commit(self, slot: int, keep: int) -> None:
        """Keep the window's first `keep` tokens."""
        self.cache.commit(slot, keep)

    def release(self, slot: int) -> None:
        """Empty the slot."""
        self.cache.reset(slot)
        self._marks.pop(slot, None)

    def mark(self, slot: int) -> None:
        """Remember the slot's committed state, in the place of an earlier mark."""
        self._marks[slot] = self.cache.snapshot(slot)

    def rewind(self, slot: int) -> None:
        """Return to the slot's mark; what was committed since is forgotten."""
        self.cache.restore(slot, self._marks[slot])

    def score(self, tokens: Seq[int]) -> Tensor:
        """The logits after each of the tokens, [T, V] float32; uses slot 0."""
        hidden = torch.cat([hidden for _, hidden in self.prefill(0, tokens)])
        self.release(0)
        return torch.cat([self.decoder.bulk_logits(part) for part in hidden.split(PREFILL_CHUNK)])
