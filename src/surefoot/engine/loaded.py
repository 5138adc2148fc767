"""A model in memory, and what engines over it share: the weights, one set of caches, one drafter of each name."""

from __future__ import annotations

import gc
from collections.abc import Sequence as Seq
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from surefoot.config import ModelConfig
from surefoot.engine.drafting import NEED_HEAD, DraftVocab, build_drafter, draft_vocabulary
from surefoot.engine.profile import kept_profile, profile_file, profile_of
from surefoot.engine.target import DecoderTarget
from surefoot.errors import InputError
from surefoot.kernels.linear import LinearFactory
from surefoot.loading.checkpoint import MtpPolicy, Progress, find_model, load_checkpoint
from surefoot.loading.tokenizer import Tokenizer
from surefoot.model import Decoder, DraftHead, MTPHead
from surefoot.model.tensors import Weights, whole
from surefoot.sampling import require_int
from surefoot.types import Drafter

if TYPE_CHECKING:  # what needs Triton is imported where there is a GPU
    from surefoot.engine.device import DeviceDrafterName, DeviceTarget, Overwrite
    from surefoot.model.fused import FusedModel


FUSED_WINDOW = 16  # tokens of the longest window on a GPU: drafters of every depth share its caches


def takes_eight_bits(device: torch.device) -> bool:
    """Whether kernels read weights of 8 bits there."""
    return runs_kernels(device, (8, 9))


def runs_kernels(device: torch.device, least: tuple[int, int]) -> bool:
    """Whether the device is a GPU of at least this compute capability, and Triton is there."""
    cuda = device.type == "cuda" and torch.cuda.get_device_capability(device) >= least
    return cuda and find_spec("triton") is not None


class LoadedModel:
    """Decoder and MTP head (None without one) with the checkpoint's tokenizer, and its folder if it has one. Engines
    over one model take turns: they use the same slots. Prompts are read `prefill_chunk` tokens at a time."""

    def __init__(
        self,
        decoder: Decoder,
        head: MTPHead | None,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Seq[int] = (),
        notes: Seq[str] = (),
        folder: Path | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        self.decoder = decoder
        self.head = head
        self.tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        self.notes = tuple(notes)
        self._folder, self._chunk = folder, prefill_chunk
        self._most = decoder.max_len
        self._targets: dict[int, DecoderTarget] = {}
        self._fused: dict[int, FusedModel] = {}
        self._draft_heads: dict[tuple[int, ...], DraftHead] = {}
        self._device_targets: dict[tuple[str, int, int, DraftHead | None, Overwrite | None], DeviceTarget] = {}
        self._drafters: dict[tuple[str, int, DraftHead | None, float], Drafter] = {}

    @property
    def config(self) -> ModelConfig:
        """The decoder's."""
        return self.decoder.config

    @classmethod
    def from_checkpoint(
        cls,
        model: str | Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_len: int,
        mtp: MtpPolicy,
        weights: str = "whole",
        progress: Progress | None = None,
        prefill_chunk: int | None = None,
    ) -> LoadedModel:
        """A bundled model, a Hugging Face folder or a hub id; `weights`: see `Engine.from_pretrained`. Those that the
        files have in 8 bits stay so on a GPU that computes with them. Raises CheckpointError; "if-present" passes over
        a head that cannot be used."""
        narrow = takes_eight_bits(device)
        found = load_checkpoint(
            find_model(model), mtp=mtp, dtype=dtype, device=device, narrow=narrow, progress=progress
        )
        usable = found.config.mtp_layers == 1 or mtp != "if-present"
        return cls.from_tensors(found.config, found.tensors, max_len, with_head=usable, narrow=weights == "fp8",
                                tokenizer=found.tokenizer, eos_token_ids=found.eos_token_ids, notes=found.notes,
                                folder=found.path, prefill_chunk=prefill_chunk)  # fmt: skip

    @classmethod
    def from_tensors(
        cls,
        config: ModelConfig,
        tensors: Weights,
        max_len: int,
        *,
        with_head: bool = True,
        narrow: bool = False,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Seq[int] = (),
        notes: Seq[str] = (),
        folder: Path | None = None,
        prefill_chunk: int | None = None,
    ) -> LoadedModel:
        """From tensors of the canonical names (`model.tensors`), which are emptied; device and dtype of the embedding
        are the model's. `narrow` cuts the linear layers' weights to 8 bits (`kernels.quantise`), on a GPU."""
        require_int("max_len", max_len, low=1)
        with torch.inference_mode():
            on_gpu = whole(tensors, "model.embed_tokens.weight").is_cuda
            linear = LinearFactory(pack=not on_gpu, quantise=narrow)  # fused kernels read weights as they are
            decoder = Decoder(config, tensors, min(max_len, config.max_positions), linear)
            head = MTPHead(decoder, tensors) if config.mtp_layers and with_head else None
        return cls(decoder, head, tokenizer=tokenizer, eos_token_ids=eos_token_ids, notes=notes, folder=folder,
                   prefill_chunk=prefill_chunk)  # fmt: skip

    def draft_head(self, wanted: DraftVocab | None) -> tuple[DraftHead | None, list[str]]:
        """The LM head's rows of a draft vocabulary (`engine.drafting`), and what the user should know of it; asked
        again, the same one. Raises InputError, also for a model without an MTP head."""
        if wanted is None:
            return None, []
        if self.head is None:
            raise InputError("draft_vocab: expected a model with an MTP head, found none")
        ids, notes = draft_vocabulary(wanted, self.config.vocab_size, self.eos_token_ids, self._folder)
        if ids not in self._draft_heads:
            with torch.inference_mode():
                self._draft_heads[ids] = DraftHead(self.decoder, ids)
        return self._draft_heads[ids], notes

    def target(self, slots: int) -> DecoderTarget:
        """The target with so many slots; asked again, the same one."""
        if slots not in self._targets:
            with torch.inference_mode():
                self._targets[slots] = DecoderTarget(self.decoder, slots, self._chunk)
        return self._targets[slots]

    def device_target(
        self,
        drafter: str,
        draft_length: int,
        slots: int,
        draft_head: DraftHead | None = None,
        *,
        overwrite: Overwrite | None = None,
        progress: Progress | None = None,
    ) -> DeviceTarget | None:
        """The target whose step, this drafter included, runs on the GPU alone; None where that cannot be: on a CPU, for
        shapes that the kernels do not take, for other drafters. Asked again, the same one. `progress(done, total)`
        follows the recording of its steps."""
        if not self.fits_kernels():
            return None
        from surefoot.engine.device import DEVICE_DRAFTERS, DeviceTarget

        if drafter not in DEVICE_DRAFTERS or (drafter in NEED_HEAD and self.head is None):
            return None
        depth = 0 if drafter == "none" else draft_length
        key = (drafter, depth, slots, draft_head, overwrite)
        if key not in self._device_targets:
            with torch.inference_mode():
                target = DeviceTarget(
                    self.fused(slots), cast("DeviceDrafterName", drafter), depth, draft_head, overwrite,
                    size=None if self.tokenizer is None else self.tokenizer.vocab_size or None, chunk=self._chunk,
                )  # fmt: skip
                target.warm_up(progress=progress)
                if target.chooses:
                    self._let_choose(target, draft_head)
                self._device_targets[key] = target
        return self._device_targets[key]

    def _let_choose(self, target: DeviceTarget, draft_head: DraftHead | None) -> None:
        """Give the target's steps' costs to what chooses among them; they are measured where no profile has them."""
        from surefoot.engine.rehearsal import measure_steps

        file = profile_file(self.decoder, self.head, draft_head, recorded=target.most)
        known = kept_profile(file, target.slots, partial(measure_steps, target))
        target.choose_by(known.costs, known.priors)

    def fused(self, slots: int) -> FusedModel:
        """The model as the GPU's step runs it, with caches for so many slots; asked again, the same one."""
        from surefoot.model.fused import FusedModel

        if slots not in self._fused:
            with torch.inference_mode():
                self._fused[slots] = FusedModel(self.decoder, self.head, slots, FUSED_WINDOW)
        return self._fused[slots]

    def fits_kernels(self) -> bool:
        """Whether `fused` can be had: a GPU, Triton, and a shape that the kernels take."""
        device = self.decoder.device
        if not runs_kernels(device, (8, 0)):
            return False
        from surefoot.model.fused import fits

        return fits(self.config)

    def drafter(
        self, name: str, slots: int, draft_head: DraftHead | None = None, min_confidence: float = 0.0
    ) -> Drafter:
        """The drafter of this name for so many slots; asked again, the same one. The first "auto" of a model on a
        machine measures what steps cost there."""
        key = (name, slots, draft_head, min_confidence)
        if key not in self._drafters:
            with torch.inference_mode():
                self._drafters[key] = build_drafter(
                    name, self.head, slots, draft_head, min_confidence,
                    lambda: profile_of(self.decoder, self.head, slots, draft_head),
                )  # fmt: skip
        return self._drafters[key]

    def clear(self, max_len: int | None = None) -> None:
        """Forget all caches and recorded steps, with what is left of the engines over them. New ones have room for
        `max_len` tokens, but at most for as many as the model was loaded with. Raises InputError below 1."""
        for owned in (self._targets, self._fused, self._device_targets, self._drafters):
            owned.clear()
        if max_len is not None:
            require_int("max_len", max_len, low=1)
            self.decoder.max_len = min(max_len, self._most)
        if self.decoder.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
