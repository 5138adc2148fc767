"""`Engine`: a target, a drafter, a tokenizer, and what callers ask of them.

One long file: most of it is the arguments of the public entry, checked and told about where they come in.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from surefoot.cache.prefix import PrefixCache
from surefoot.drafters.auto import AutoDrafter
from surefoot.drafters.draft_model import DraftModelDrafter
from surefoot.drafters.none import NoDrafter
from surefoot.engine.arguments import check_weights, parse_device, parse_dtype
from surefoot.engine.drafting import (
    NAMES,
    NEED_HEAD,
    DraftVocab,
    check_draft_length,
    check_drafter,
    check_takes_confidence,
    check_takes_vocabulary,
    has_all,
    usual_draft_length,
)
from surefoot.engine.generation import Generation
from surefoot.engine.loaded import LoadedModel
from surefoot.engine.loop import StepRecord
from surefoot.engine.memory import Memory, memory_of
from surefoot.engine.prompts import Progress
from surefoot.engine.request import Intake
from surefoot.engine.runner import HostRunner, Runs, RunsItself, SplitRunner, Ways, drain
from surefoot.engine.stats import Clock, Stats
from surefoot.engine.target import DecoderTarget
from surefoot.errors import CheckpointError, InputError, shown
from surefoot.loading.checkpoint import MtpPolicy
from surefoot.loading.tokenizer import Tokenizer, require_tokenizer
from surefoot.sampling import SamplingParams, check_stop_ids, check_token_ids, require_int
from surefoot.sequence import Sequence, TokenLogprobs
from surefoot.types import Drafter, Target

MAX_SIZE = 2**63 - 1  # of anything in a tensor
Host = Callable[[], tuple[Target, Drafter]]
TARGET_PARTS = ("vocab_size", "max_len", "slots", "prefill", "verify", "commit", "release")
Prompt = str | Seq[int]


class Engine:
    """Decodes requests with one target and one drafter. Not safe for use from several threads at once.

    `draft_length` (K) bounds a draft; `notes` are sentences that a user should see, such as a drafter that was chosen
    because the wanted one was not there. `host` gives the target and drafter for requests that ask for more than a
    target with a step of its own can do; `drafters` builds others by name, for requests that choose their own. With
    `prefix_cache_bytes`, as much of what was read of prompts is kept for others that begin alike. Raises InputError for
    parts that are none.
    """

    def __init__(
        self,
        target: Target | RunsItself,
        drafter: Drafter,
        draft_length: int,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Seq[int] = (),
        notes: Seq[str] = (),
        host: Host | None = None,
        drafters: Callable[[str], Drafter] | None = None,
        prefix_cache_bytes: int = 0,
    ) -> None:
        if not isinstance(target, RunsItself) and not has_all(target, TARGET_PARTS):
            raise InputError(f"target: expected a Target ({', '.join(TARGET_PARTS)}), found {shown(target)}")
        check_drafter(drafter, ())
        if isinstance(target, RunsItself) and drafter is not target.drafter:
            raise InputError(
                f"drafter: expected the one in the target's own step, {target.drafter.name!r}, found {drafter.name!r}: "
                "other drafters need an engine of their own, see Engine.over"
            )
        self.target = target
        check_draft_length(drafter.name, draft_length, self.device)
        self.drafter = drafter
        self.draft_length = 0 if drafter.name == "none" else draft_length  # then not even a grammar drafts
        self.tokenizer = tokenizer
        self.eos_token_ids = check_stop_ids("eos_token_ids", eos_token_ids)
        self.notes = tuple(notes)
        self.clock = Clock()
        self._host, self._drafters = host, drafters
        decoder = target.decoder if isinstance(target, (DecoderTarget, RunsItself)) else None
        self._intake = Intake(tokenizer, decoder, self.eos_token_ids)
        self.prefixes = PrefixCache(prefix_cache_bytes) if prefix_cache_bytes else None
        self._held: str | None = None

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = "float32",
        weights: str = "whole",
        drafter: str | Drafter = "mtp",
        draft_length: int | None = None,
        slots: int = 1,
        max_len: int = 4096,
        draft_model: str | Path | None = None,
        draft_vocab: DraftVocab | None = None,
        min_confidence: float = 0.0,
        prefill_chunk: int | None = None,
        prefix_cache_bytes: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Engine:
        """Load a bundled model ("surefoot-demo"), a Hugging Face folder, or a hub id.

        `drafter`: "none", "ngram", "suffix", "mtp", "mtp+ngram", "mtp+suffix", "draft-model" (needs `draft_model`, any
        second checkpoint of this family with the same vocabulary), "auto" (at each step whichever of none,
        n-gram and MTP is fastest), or a Drafter of your own. A step drafts at most `draft_length` tokens (3; "auto"
        8). `slots` prompts decode together; `max_len` bounds prompt and output of each, as do the positions
        that the model has. `weights`: "whole" takes them as the checkpoint has them, "fp8" cuts those of linear
        layers to 8 bits, on a GPU of compute capability 8.9 or above. `draft_vocab` has the MTP head draft
        among some tokens alone (and the end ids): so many of the most frequent ones, a file with a JSON list of
        ids, or ids; `notes` say where the most frequent ones come from. With `min_confidence` above 0 a draft of the
        MTP head ends once the head's own probabilities multiply to less than that (on a GPU, in the host's loop).
        Prompts are read `prefill_chunk` tokens at a time (as many as suit the device, if not given), and up to
        `prefix_cache_bytes` of what was read are kept, to be used by prompts that begin with the same chunks.
        `progress(done, total)` follows the loading and then, from 0 again, the recording of a GPU's steps.

        Raises InputError for an argument, CheckpointError for the files; nothing is left behind.
        """
        torch_dtype, torch_device = parse_dtype(dtype), parse_device(device)
        check_weights(weights, torch_device)
        draft_length = usual_draft_length(check_drafter(drafter), draft_length, torch_device)
        chunk = 1 if prefill_chunk is None else prefill_chunk
        for name, value in (("slots", slots), ("max_len", max_len), ("prefill_chunk", chunk)):
            require_int(name, value, low=1, high=MAX_SIZE)
        if progress is not None and not callable(progress):
            raise InputError(f"progress: expected a function of (done, total), found {shown(progress)}")
        if (drafter == "draft-model") != (draft_model is not None):
            raise InputError("draft_model: expected exactly with drafter='draft-model', found "
                             f"drafter={drafter!r}, draft_model={shown(draft_model)}")  # fmt: skip
        if draft_vocab is not None:
            check_takes_vocabulary(drafter)
        check_takes_confidence(drafter, min_confidence)
        policy: MtpPolicy = "require" if drafter in NEED_HEAD else "if-present" if drafter == "auto" else "skip"

        def load(name: str | Path, mtp: MtpPolicy) -> LoadedModel:
            return LoadedModel.from_checkpoint(
                name, device=torch_device, dtype=torch_dtype, max_len=max_len, mtp=mtp, weights=weights,
                prefill_chunk=prefill_chunk, progress=progress,
            )  # fmt: skip

        with torch.inference_mode():
            loaded = load(model, policy)
            if draft_model is not None:
                target = loaded.target(slots)
                drafter = DraftModelDrafter(load(draft_model, "skip").target(slots), target.vocab_size)
            return cls.over(loaded, drafter=drafter, draft_length=draft_length, slots=slots, draft_vocab=draft_vocab,
                            min_confidence=min_confidence, prefix_cache_bytes=prefix_cache_bytes,
                            progress=progress)  # fmt: skip

    @classmethod
    def over(
        cls,
        model: LoadedModel,
        *,
        drafter: str | Drafter = "mtp",
        draft_length: int | None = None,
        slots: int = 1,
        draft_vocab: DraftVocab | None = None,
        min_confidence: float = 0.0,
        prefix_cache_bytes: int = 0,
        progress: Progress | None = None,
    ) -> Engine:
        """An engine over a model that is loaded, whose weights and caches it shares with other engines over it: they
        take turns, none may start while another's stream is open. `progress(done, total)` follows the recording of a
        GPU's steps. Raises as `from_pretrained` does."""
        require_int("slots", slots, low=1, high=MAX_SIZE)
        own = [name for name in NAMES if name != "draft-model"]  # which comes as a Drafter
        draft_length = usual_draft_length(check_drafter(drafter, own), draft_length, model.decoder.device)
        notes = list(model.notes)
        if drafter == "auto" and model.head is None:
            notes.append("drafter 'auto': no MTP head that can be used, so drafts come from n-gram lookup")
        if draft_vocab is not None:
            check_takes_vocabulary(drafter)
        check_takes_confidence(drafter, min_confidence)
        draft_head, said = model.draft_head(draft_vocab)
        notes += said

        def named(name: str) -> Drafter:
            return model.drafter(name, slots, draft_head, min_confidence)

        def host() -> tuple[Target, Drafter]:
            return model.target(slots), named(drafter) if isinstance(drafter, str) else drafter

        device = None
        if isinstance(drafter, str) and not min_confidence:  # a recorded step drafts as many tokens each time
            device = model.device_target(drafter, draft_length, slots, draft_head, progress=progress)
        target, chosen = host() if device is None else (device, device.drafter)
        return cls(target, chosen, draft_length, tokenizer=model.tokenizer,
                   eos_token_ids=model.eos_token_ids, notes=notes, host=host, prefix_cache_bytes=prefix_cache_bytes,
                   drafters=named)  # fmt: skip

    def plain(self) -> Engine:
        """An engine that decodes plainly, over the same weights and slots; the two take turns."""
        target: Target | RunsItself = self.target
        drafter: Drafter = NoDrafter()
        if isinstance(target, RunsItself):
            target = target.plain()
            drafter = target.drafter
        drafting = self._host

        def host() -> tuple[Target, Drafter]:
            assert drafting is not None
            return drafting()[0], NoDrafter()

        return Engine(target, drafter, 0, tokenizer=self.tokenizer, eos_token_ids=self.eos_token_ids, notes=self.notes,
                      host=None if drafting is None else host)  # fmt: skip

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is also a sequence of str; it is one prompt
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generation: ...
    @overload
    def generate(
        self, prompt: Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[Generation]: ...
    def generate(
        self, prompt: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> Generation | list[Generation]:
        """Decode one prompt (text or token ids) to its end, or several together: a list of prompts gives a list.

        `params` is one for all or one per prompt. Raises InputError for an empty prompt, a token id outside the
        vocabulary, or a prompt that leaves no room in `max_len`; TokenizerError for text without a tokenizer;
        NumericalError if the model gives logits that are not numbers. All prompts are checked before any is read.
        With `n` > 1 the result is the first choice, and its `choices` are all of them.
        """
        single = isinstance(prompt, str) or not _is_batch(prompt)
        prompts: list[Any] = [prompt] if single else list(prompt)
        each: list[Any] = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if params is None:
            each = [SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise InputError(f"params: expected one, or one per prompt ({len(prompts)}), found {len(each)}")
        requests = [self._choices(p, s) for p, s in zip(prompts, each, strict=True)]
        sequences = [sequence for choices in requests for sequence in choices]
        stats = {id(sequence): Stats() for sequence in sequences}
        logprobs: dict[int, list[TokenLogprobs]] = {id(sequence): [] for sequence in sequences}
        before = self.clock.copy()
        for record in self._run(sequences):
            own = stats[id(record.sequence)]
            own.add(record)
            own.cached_tokens = record.sequence.cached_tokens
            vars(own).update(self.clock.since(before))
            logprobs[id(record.sequence)] += record.logprobs or ()
        results = []
        for choices in requests:
            first, *further = [self._generation(s, stats[id(s)], logprobs[id(s)]) for s in choices]
            results.append(replace(first, further=tuple(further)))
        return results[0] if single else results

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, progress: Progress | None = None
    ) -> Iterator[StepRecord]:
        """Decode one prompt and yield every step as it is made. Arguments are checked at the call; `clock` tells the
        time by phase so far. `progress(done, total)` counts prompt tokens while they are read. One choice only: raises
        InputError for `n` > 1."""
        return self._run([self.sequence(prompt, SamplingParams() if params is None else params)], progress)

    def logits(self, token_ids: Seq[int]) -> Tensor:
        """The target's logits after each of the given tokens, [T, V] float32."""
        tokens = self._check_tokens(token_ids, room=0)
        target = self._own_target("logits")
        self._check_idle()
        with torch.inference_mode():
            return target.score(tokens)

    def memory(self) -> Memory:
        """What target and drafter take of memory, in bytes. Raises InputError for a target that is no checkpoint's."""
        return memory_of((self._own_target("memory"), self.drafter), getattr(self.target, "graph_bytes", 0))

    def encode(self, text: str) -> list[int]:
        """Text to token ids. Raises TokenizerError if the model has no tokenizer."""
        return require_tokenizer(self.tokenizer, "a text prompt").encode(text)

    def _run(self, sequences: list[Sequence], progress: Progress | None = None) -> Generator[StepRecord, None, None]:
        records = drain(self.runner(Ways(self.clock, progress, prefixes=self.prefixes)), sequences)
        self.hold("open stream to be read to the end or closed")
        try:
            while True:
                with torch.inference_mode():  # not around the yield: the caller's own code runs there
                    record = next(records, None)
                if record is None:
                    return
                yield record
        finally:
            with torch.inference_mode():
                records.close()
            self.let_go()

    def hold(self, holder: str) -> None:
        """Take the slots, in the name of a holder. Raises InputError while another has them."""
        self._check_idle()
        self._held = holder

    def let_go(self) -> None:
        """Give the slots back."""
        self._held = None

    def runner(self, ways: Ways) -> Runs:
        """What runs requests in the engine's slots, for the holder."""
        if not isinstance(self.target, RunsItself):
            return HostRunner(self.target, self.drafter, self.draft_length, ways)
        return SplitRunner(self.target.runner(ways), self._on_host(ways))

    def _on_host(self, ways: Ways) -> Callable[[], Runs]:
        """What runs the requests that the target's own step does not serve. It keeps nothing of prompts: what its
        drafter has is not what the step has."""

        def build() -> Runs:
            assert self._host is not None  # `_sequence` has seen to that
            return HostRunner(*self._host(), self.draft_length, replace(ways, prefixes=None))

        return build

    def choose_drafter(self, name: str | None, draft_length: int | None) -> tuple[Drafter, int]:
        """The drafter and draft length of a request that may name its own; None is the engine's.

        Raises InputError for a name that is none, for one that needs what the engine was not loaded with, and for a
        choice that a device's step does not have.
        """
        own = self.drafter.name
        drafter = self.drafter if name is None or name == own else self._build_drafter(name)
        if draft_length is None:
            own_length = self.draft_length if own != AutoDrafter.name or drafter is self.drafter else None
            draft_length = (
                0 if drafter.name == "none" else usual_draft_length(drafter.name, own_length or None, self.device)
            )
        elif drafter.name != "none":
            check_draft_length(drafter.name, draft_length, self.device)
        if isinstance(self.target, RunsItself) and draft_length != self.draft_length:
            raise InputError(f"draft_length: expected that of the device's step, {self.draft_length}, "
                             f"found {draft_length}")  # fmt: skip
        return drafter, draft_length

    def _build_drafter(self, name: str) -> Drafter:
        if isinstance(self.target, RunsItself):
            raise InputError(
                f"drafter: expected the one in the device's step, {self.drafter.name!r}, found {shown(name)}"
            )
        if name == "none":
            return NoDrafter()
        if self._drafters is None or name not in NAMES or name == "draft-model":
            known = () if self._drafters is None else (other for other in NAMES if other != "draft-model")
            names = ", ".join(map(repr, dict.fromkeys(("none", *known))))
            raise InputError(f"drafter: expected {self.drafter.name!r}, the engine's own, or {names}, "
                             f"found {shown(name)}")  # fmt: skip
        try:
            with torch.inference_mode():
                return self._drafters(name)
        except CheckpointError as error:
            raise InputError(str(error)) from error

    @property
    def device(self) -> torch.device:
        """Where the target is; a CPU for all it is known of targets of other kinds."""
        if isinstance(self.target, (DecoderTarget, RunsItself)):
            return self.target.decoder.device
        return torch.device("cpu")

    def _own_target(self, name: str) -> DecoderTarget | RunsItself:
        if not isinstance(self.target, (DecoderTarget, RunsItself)):
            raise InputError(f"{name}: expected a checkpoint's target, found {type(self.target).__name__}")
        return self.target

    def _check_idle(self) -> None:
        if self._held is not None:
            raise InputError(f"engine: expected its {self._held} first, found it open")

    def sequence(self, prompt: Prompt, params: SamplingParams) -> Sequence:
        """The sequence that a request for one choice asks for, checked as `generate` does. Raises InputError for
        `n` > 1, too."""
        choices = self._choices(prompt, params)
        if len(choices) > 1:
            raise InputError(f"n: expected 1 (take each of params.choices() in turn), found {len(choices)}")
        return choices[0]

    def _choices(self, prompt: Prompt, params: SamplingParams) -> list[Sequence]:
        """A sequence for each of the choices that the request asks for."""
        if not isinstance(params, SamplingParams):
            raise InputError(f"params: expected SamplingParams, found {shown(params)}")
        tokens = self._check_tokens(self.encode(prompt) if isinstance(prompt, str) else prompt, room=1)
        return [self._sequence(list(tokens), choice) for choice in params.choices()]

    def _sequence(self, tokens: list[int], params: SamplingParams) -> Sequence:
        if params.needs_host and isinstance(self.target, RunsItself) and self._host is None:
            raise InputError("params: expected what the target's own step can do, found more: see Engine.over")
        limit = min(len(tokens) + params.max_new_tokens, self.target.max_len)
        stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else self.eos_token_ids)
        return Sequence(
            0, tokens, params, limit, stop_ids,
            rules=self._intake.rules(params, tokens, stop_ids, self.target.vocab_size),
            text=self._intake.text(params),
            prompt=self._intake.prompt_reader(params, tokens),
        )  # fmt: skip

    def _generation(self, sequence: Sequence, stats: Stats, logprobs: list[TokenLogprobs]) -> Generation:
        assert sequence.finish_reason is not None
        text = self._intake.text(sequence.params)
        return Generation(
            sequence.output, sequence.finish_reason, stats, self.tokenizer,
            logprobs=None if sequence.params.logprobs is None else logprobs,
            prompt_logprobs=None if sequence.prompt is None else sequence.prompt.logprobs,
            cut_text=None if text is None else text.push(sequence.output) + text.flush(),
        )  # fmt: skip

    def _check_tokens(self, prompt: Seq[int], room: int) -> list[int]:
        tokens = check_token_ids("prompt", prompt, self.target.vocab_size)
        if not tokens:
            raise InputError("prompt: expected at least one token, found none")
        if len(tokens) > self.target.max_len - room:
            raise InputError(f"prompt: expected at most {self.target.max_len - room} tokens "
                             f"(max_len {self.target.max_len}), found {len(tokens)}")  # fmt: skip
        return tokens


def _is_batch(prompt: Seq[Any]) -> bool:
    return isinstance(prompt, (list, tuple)) and len(prompt) > 0 and hasattr(prompt[0], "__len__")
