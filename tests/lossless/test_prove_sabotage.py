"""A broken engine must not pass `surefoot prove`: five faults, each wherever somebody might put it.

One long file: it is a list of faults, all put to the one proof.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.cache import KVCache, RecurrentCache
from surefoot.cache.hybrid import HybridCache
from surefoot.cli.main import run
from surefoot.engine import loop
from surefoot.engine.target import DecoderTarget
from surefoot.kernels import gated_delta, norm
from surefoot.kernels.norm import GatedRMSNorm, L2Norm, RMSNorm
from surefoot.loading.tiny import byte_tokenizer, tiny_config, write_checkpoint
from surefoot.model import attention, block, decoder
from surefoot.model import mtp as head
from surefoot.model.tensors import random_tensors
from surefoot.prove.report import Report
from surefoot.prove.run import prove
from surefoot.prove.settings import Settings
from surefoot.sequence import Sequence
from surefoot.types import Draft, Verdict
from surefoot.verify import Purpose, acceptance, process

Patch = pytest.MonkeyPatch
SAMPLES = 100  # 250 seeds on the table: enough for every fault here, and half of what --quick takes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(tied=True, vocab_size=260, layer_types=("linear_attention", "full_attention"))
    tensors = random_tensors(config, seed=3)
    tensors["model.embed_tokens.weight"] *= 0.2
    return write_checkpoint(tmp_path_factory.mktemp("model"), config, tensors, tokenizer=byte_tokenizer())


def report(model: Path, parts: Seq[str]) -> Report:
    settings = Settings(model=model, quick=True, tokens=8, samples=SAMPLES, drafters=("ngram", "mtp"))
    return prove(settings, parts=parts)


def wrapped(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Put `change(own, *args)` in the place of the owner's function."""
    own = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **more: change(own, *args, **more))


# ---------------------------------------------------------------- stale state by one token


def settle_one_fewer(patch: Patch) -> None:
    wrapped(patch, RecurrentCache, "settle", lambda own, self, slot, keep: own(self, slot, max(1, keep - 1)))


def settle_one_more(patch: Patch) -> None:
    def more(own: Any, self: RecurrentCache, slot: int, keep: int) -> None:
        tape = self._tape[slot]
        own(self, slot, keep if tape is None else min(len(tape), keep + 1))

    wrapped(patch, RecurrentCache, "settle", more)


def replay_one_fewer(patch: Patch) -> None:
    wrapped(patch, gated_delta.Tape, "replay_", lambda own, self, state, start, stop: own(self, state, start, stop - 1))


def never_settle_partly(patch: Patch) -> None:
    wrapped(patch, gated_delta.Tape, "replay_", lambda own, self, state, start, stop: None)


def keep_the_drafts(patch: Patch) -> None:
    """The state that has read all of the window stays, whatever was refused."""

    def all_of_it(own: Any, self: RecurrentCache, slot: int, keep: int) -> None:
        if self._tape[slot] is not None and len(self._tape[slot] or ()) > 1:
            self.state[slot].copy_(self.ahead[slot])
            self._tape[slot] = None
            self._offset[slot] += keep
        else:
            own(self, slot, keep)

    wrapped(patch, RecurrentCache, "settle", all_of_it)


def strip_one_behind(patch: Patch) -> None:
    def behind(own: Any, self: RecurrentCache, slot: int, keep: int) -> None:
        partial = self._tape[slot] is not None and keep > 1
        own(self, slot, keep)
        self._offset[slot] -= partial

    wrapped(patch, RecurrentCache, "settle", behind)


def always_one_behind(patch: Patch) -> None:
    """In plain decoding, too: the convolution misses the last token."""
    wrapped(patch, RecurrentCache, "conv_past", lambda own, self, slot: own(self, slot).roll(1, 0))


def commit_one_fewer(patch: Patch) -> None:
    wrapped(patch, DecoderTarget, "commit", lambda own, self, slot, keep: own(self, slot, max(1, keep - 1)))


def first_token_not_applied(patch: Patch) -> None:
    """Every window leaves the state as it found it, in plain decoding, too."""

    def forgets(own: Any, *args: Any) -> Any:
        state = args[5].clone()
        tape = own(*args)
        args[5].copy_(state)
        return tape

    wrapped(patch, gated_delta, "window", forgets)


# ---------------------------------------------------------------- p and q swapped


def swap_in_the_test(patch: Patch) -> None:
    def swapped(own: Any, tokens: Tensor, p: Tensor, q: Tensor | None, draws: Tensor) -> Verdict:
        if q is None or not len(tokens):
            verdict: Verdict = own(tokens, p, q, draws)
            return verdict
        mixed = own(tokens, torch.cat([q, p[-1:].to(q.dtype)]), p[:-1].to(q.dtype), draws)
        assert isinstance(mixed, Verdict)
        return mixed

    wrapped(patch, acceptance, "_accept", swapped)


def swap_the_ratio_only(patch: Patch) -> None:
    """A draft is kept if u < q/p; what follows it is drawn as it should be."""

    def swapped(own: Any, tokens: Tensor, p: Tensor, q: Tensor | None, draws: Tensor) -> Verdict:
        if q is not None and len(tokens):
            mine, theirs = (rows.gather(1, tokens[:, None])[:, 0].double() for rows in (p[:-1], q))
            kept = (draws[:-1] < theirs / mine).tolist()
            uniforms = [0.0 if keep else 1 - 2**-53 for keep in kept]
            draws = torch.tensor([*uniforms, float(draws[-1])], dtype=torch.float64)
        verdict: Verdict = own(tokens, p, q, draws)
        return verdict

    wrapped(patch, acceptance, "_accept", swapped)


def swap_the_residual(patch: Patch) -> None:
    """What replaces a refused draft is drawn from max(0, q - p)."""

    def swapped(own: Any, tokens: Tensor, p: Tensor, q: Tensor | None, draws: Tensor) -> Verdict:
        verdict: Verdict = own(tokens, p, q, draws)
        if q is None or verdict.accepted == len(tokens):
            return verdict
        row = (q[verdict.accepted] - p[verdict.accepted]).clamp(min=0).double()
        return Verdict(verdict.accepted, int(acceptance._draw(row, draws[-1:]))) if row.sum() > 0 else verdict

    wrapped(patch, acceptance, "_accept", swapped)


def swap_in_the_loop(patch: Patch) -> None:
    def swapped(own: Any, draft: Draft, logits: Tensor, params: Any, position: int) -> Verdict:
        if draft.probs is not None:
            rows = torch.cat([draft.probs.clamp(min=1e-30).log(), logits[-1:]])
            draft = Draft(draft.tokens, process(logits[:-1], params).softmax(-1), draft.source)
            logits = rows
        verdict: Verdict = own(draft, logits, params, position)
        return verdict

    wrapped(patch, loop, "verify", swapped)


def swap_in_accept(patch: Patch) -> None:
    def swapped(own: Any, tokens: Any, p: Any, q: Any, draws: Any) -> Verdict:
        verdict: Verdict = own(tokens, torch.cat([q, p[-1:]]), p[:-1], draws)
        return verdict

    wrapped(patch, acceptance, "accept", swapped)


# ---------------------------------------------------------------- one uniform for all positions


def one_uniform_a_window(patch: Patch) -> None:
    def shared(own: Any, seed: int, positions: Seq[int], *rest: Any, **more: Any) -> Tensor:
        drawn: Tensor = own(seed, positions, *rest, **more)
        return drawn[:1].expand_as(drawn)

    wrapped(patch, acceptance, "uniforms", shared)


def one_uniform_for_all(patch: Patch) -> None:
    def shared(own: Any, seed: int, positions: Seq[int], *rest: Any, **more: Any) -> Tensor:
        drawn: Tensor = own(seed, [0] * len(positions), *rest, **more)
        return drawn

    wrapped(patch, acceptance, "uniforms", shared)


def one_uniform_for_draft_and_test(patch: Patch) -> None:
    wrapped(patch, acceptance, "uniforms", lambda own, seed, positions, purpose, start=0, device="cpu":
            own(seed, positions, Purpose.ACCEPT, 0, device))  # fmt: skip


def one_uniform_in_accept(patch: Patch) -> None:
    """Also the last draw's."""
    wrapped(
        patch, acceptance, "_accept", lambda own, tokens, p, q, draws: own(tokens, p, q, draws[:1].expand_as(draws))
    )


def one_uniform_in_philox(patch: Patch) -> None:
    def shared(own: Any, counter: Any, key: Any) -> Any:
        return own((counter[0], 0, *counter[2:]), key)

    wrapped(patch, sys.modules["surefoot.verify.philox"], "philox", shared)


def one_noise_a_window(patch: Patch) -> None:
    def shared(own: Any, seed: int, positions: Seq[int], *rest: Any) -> Tensor:
        noise: Tensor = own(seed, positions, *rest)
        return noise[:1].expand_as(noise)

    wrapped(patch, acceptance, "gumbel", shared)


def one_noise_for_all(patch: Patch) -> None:
    wrapped(patch, acceptance, "gumbel", lambda own, seed, positions, *rest: own(seed, range(len(positions)), *rest))


# ---------------------------------------------------------------- rolled back by one too many or too few


def length_one_more(patch: Patch) -> None:
    """After a refusal."""

    def longer(own: Any, self: HybridCache, slot: int, keep: int) -> None:
        refused = keep < self._window[slot]
        own(self, slot, keep)
        self.length[slot] += refused

    wrapped(patch, HybridCache, "commit", longer)


def length_one_less(patch: Patch) -> None:
    def shorter(own: Any, self: HybridCache, slot: int, keep: int) -> None:
        refused = keep < self._window[slot]
        own(self, slot, keep)
        self.length[slot] -= refused

    wrapped(patch, HybridCache, "commit", shorter)


def length_always_one_more(patch: Patch) -> None:
    def longer(own: Any, self: HybridCache, slot: int, keep: int) -> None:
        own(self, slot, keep)
        self.length[slot] += 1

    wrapped(patch, HybridCache, "commit", longer)


def no_rollback(patch: Patch) -> None:
    def whole(own: Any, self: HybridCache, slot: int, keep: int) -> None:
        size = self._window[slot]
        own(self, slot, keep)
        self.length[slot] += size - keep

    wrapped(patch, HybridCache, "commit", whole)


def write_one_late(patch: Patch) -> None:
    wrapped(patch, KVCache, "write", lambda own, self, slot, position, keys, values:
            own(self, slot, position + (position > 60), keys, values))  # fmt: skip


def read_one_less(patch: Patch) -> None:
    def shorter(own: Any, query: Tensor, keys: Tensor, values: Tensor, lengths: range) -> list[Tensor]:
        start = max(1, lengths.start - 1)
        out: list[Tensor] = own(query, keys, values, range(start, start + len(lengths)))
        return out

    wrapped(patch, attention, "attend_each", shorter)


def commit_in_the_loop(patch: Patch) -> None:
    wrapped(patch, Sequence, "extend", lambda own, self, tokens: max(1, own(self, tokens) - 1))


def restore_one_more(patch: Patch) -> None:
    def longer(own: Any, self: HybridCache, slot: int, snapshot: Any) -> None:
        own(self, slot, snapshot)
        self.length[slot] += 1

    wrapped(patch, HybridCache, "restore", longer)


# ---------------------------------------------------------------- a wrong norm


def without_one(patch: Patch) -> None:
    wrapped(patch, RMSNorm, "__init__", lambda own, self, scale, eps: own(self, scale - 1, eps))


def shifted_twice(patch: Patch) -> None:
    wrapped(patch, RMSNorm, "__init__", lambda own, self, scale, eps: own(self, scale + 1, eps))


def scale_of_one(patch: Patch) -> None:
    wrapped(patch, RMSNorm, "__call__", lambda own, self, x: own(self, x) / self.scale)


def sum_for_mean(patch: Patch) -> None:
    patch.setattr(norm, "inverse_norm", lambda x, floor: (x.square().mean(-1, keepdim=True) + floor).rsqrt())


def last_norm_without_one(patch: Patch) -> None:
    wrapped(patch, decoder, "RMSNorm", lambda own, scale, eps: own(scale - 1, eps))


def block_norms_without_one(patch: Patch) -> None:
    wrapped(patch, block, "RMSNorm", lambda own, scale, eps: own(scale - 1, eps))


def query_norm_without_one(patch: Patch) -> None:
    wrapped(patch, attention, "RMSNorm", lambda own, scale, eps: own(scale - 1, eps))


def head_norms_without_one(patch: Patch) -> None:
    wrapped(patch, head, "RMSNorm", lambda own, scale, eps: own(scale - 1, eps))


def no_unit_length(patch: Patch) -> None:
    patch.setattr(L2Norm, "__call__", lambda self, x: x)


def gate_before_norm(patch: Patch) -> None:
    def gated(own: Any, self: GatedRMSNorm, x: Tensor, gate: Tensor) -> Tensor:
        rows, width = x.shape
        both = (x * torch.nn.functional.silu(gate)).view(rows, -1, self._width)
        normed: Tensor = self._norm(both).view(rows, width)
        return normed

    wrapped(patch, GatedRMSNorm, "__call__", gated)


def gated_scale_plus_one(patch: Patch) -> None:
    wrapped(patch, GatedRMSNorm, "__init__", lambda own, self, scale, eps: own(self, scale + 1, eps))


STALE = [
    settle_one_fewer, settle_one_more, replay_one_fewer, never_settle_partly, keep_the_drafts, strip_one_behind,
    always_one_behind, commit_one_fewer, first_token_not_applied,
]  # fmt: skip
SWAPPED = [swap_in_the_test, swap_the_ratio_only, swap_the_residual, swap_in_the_loop, swap_in_accept]
SHARED = [
    one_uniform_a_window, one_uniform_for_all, one_uniform_for_draft_and_test, one_uniform_in_accept,
    one_uniform_in_philox, one_noise_a_window, one_noise_for_all,
]  # fmt: skip
ROLLED_BACK = [
    length_one_more, length_one_less, length_always_one_more, no_rollback, write_one_late, read_one_less,
    commit_in_the_loop, restore_one_more,
]  # fmt: skip
NORMS = [
    without_one, shifted_twice, scale_of_one, sum_for_mean, last_norm_without_one, block_norms_without_one,
    query_norm_without_one, head_norms_without_one, no_unit_length, gate_before_norm, gated_scale_plus_one,
]  # fmt: skip
FIVE: dict[Callable[[Patch], None], tuple[str, str]] = {  # the part of a proof that notices, and its title
    settle_one_fewer: ("caches", "cache states"), swap_in_the_test: ("law", "exact law"),
    one_uniform_a_window: ("law", "exact law"), length_one_more: ("caches", "cache states"),
    without_one: ("parity", "textbook reference"),
}  # fmt: skip


def test_the_intact_engine_passes(model: Path) -> None:
    """The control of all below."""
    found = report(model, ("law", "caches", "parity"))
    assert found.passed, found.failures
    assert all(len(section.checks) > 3 for section in found.sections)


@pytest.mark.parametrize("sabotage", FIVE, ids=lambda sabotage: sabotage.__name__)
def test_the_command_fails(
    sabotage: Callable[[Patch], None], model: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    part, title = FIVE[sabotage]
    sabotage(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["surefoot", "prove", "--model", str(model), "--quick", "-n", "8", "-d", "ngram"])
    monkeypatch.setattr("surefoot.cli.prove.prove", partial(prove, parts=[part]))  # the others would take long
    monkeypatch.setattr(Settings, "sample_count", SAMPLES)
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 1
    out, err = capsys.readouterr()
    assert f"{title}: FAILED" in out
    assert "NOT LOSSLESS" in out
    assert err.startswith("error: prove: expected every check to hold")


@pytest.mark.parametrize("sabotage", [*STALE, *ROLLED_BACK, *NORMS], ids=lambda sabotage: sabotage.__name__)
def test_broken_caches_and_layers_fail(sabotage: Callable[[Patch], None], model: Path, monkeypatch: Patch) -> None:
    sabotage(monkeypatch)
    parts = ("parity", "caches") if sabotage in NORMS else ("caches", "parity")
    assert any(report(model, (part,)).failures for part in parts)  # the likelier one first


@pytest.mark.parametrize(
    "sabotage",
    [pytest.param(s, marks=[] if s is one_noise_a_window else pytest.mark.slow) for s in (*SWAPPED, *SHARED)],
    ids=lambda sabotage: sabotage.__name__,
)
def test_broken_chance_fails(sabotage: Callable[[Patch], None], model: Path, monkeypatch: Patch) -> None:
    sabotage(monkeypatch)
    failures = report(model, ("law",)).failures
    assert failures
    if sabotage in SHARED:  # by what comes out, too, not by the numbers alone
        assert any("seeds" in name and "control" not in name for name in failures)
