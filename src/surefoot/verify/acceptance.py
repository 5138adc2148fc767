"""Which draft tokens are kept, and which token follows them. Pure functions: no cache, no model, no drafter.

Two rules keep one promise, that the output has the target's law whatever the drafter (docs/acceptance.md):

- *rejection* (Leviathan, Kalman, Matias 2023, arXiv 2211.17192, section 2.3 and appendix A.1): `accept`;
- *coupled* (Daliri, Musco, Suresh 2024, arXiv 2408.07978, section 4): the target's token at a position is a function of
  the seed and the history (`choose`), and a draft token is kept if it is that very token (`accept_exact`). Greedy
  decoding is this rule without the noise.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from surefoot.errors import InputError
from surefoot.sampling import SamplingParams, check_token_ids
from surefoot.types import Draft, Verdict
from surefoot.verify.arrays import Array, real_tensor
from surefoot.verify.distribution import check_finite, check_request, process, process_unchecked
from surefoot.verify.philox import Purpose, gumbel, uniforms

_TOLERANCE = 1e-3  # of a distribution's sum; half precision stays well inside


def verify(draft: Draft, logits: Tensor, params: SamplingParams, position: int) -> Verdict:
    """Judge a draft of K tokens by the target's logits [K + 1, V], of which row i decides the token at `position + i`.

    Under the p/q rule a draft token's uniform is keyed by (ACCEPT, its position), and the last draw by (LAST,
    `position`). Each is consulted once in a sequence's life: the tests behind the first rejection have no say in the
    verdict, and the next window begins behind its last token. So both are independent of all that came before and of
    the draft, whose own draws have another purpose.

    Raises InputError if the shapes disagree, NumericalError naming the position of a row of logits that cannot be used.
    """
    check_request(logits, params, position)
    width = len(draft.tokens) + 1
    if logits.shape[0] != width:
        raise InputError(f"logits: expected [{width}, V] for {width - 1} draft tokens, found {list(logits.shape)}")
    if params.greedy or params.acceptance == "coupled":
        return accept_exact(draft.tokens, choose(logits, params, position))
    target_probs = process(logits, params, position).softmax(dim=-1)
    draft_probs = None
    if draft.probs is not None and width > 1:
        draft_probs = real_tensor("draft.probs", draft.probs).to(logits.device)
        if draft_probs.shape != (width - 1, logits.shape[1]):
            expected = [width - 1, logits.shape[1]]
            raise InputError(f"draft.probs: expected {expected}, found {list(draft_probs.shape)}")
    draws = torch.cat(
        (
            uniforms(params.seed, range(position, position + width - 1), Purpose.ACCEPT, device=logits.device),
            uniforms(params.seed, (position,), Purpose.LAST, device=logits.device),
        )
    )
    tokens = torch.tensor(draft.tokens, dtype=torch.int64, device=logits.device)
    return _accept(tokens, target_probs, draft_probs, draws)


def choose(logits: Tensor, params: SamplingParams, position: int) -> list[int]:
    """The target's own token for every row of logits [n, V], of which row i decides the token at `position + i`.

    The largest logit at temperature 0, else the largest sum of processed logit and Gumbel noise keyed by (seed,
    position, token), which has the law of the processed distribution. Ties go to the lowest id. A function of seed and
    history alone (arXiv 2408.07978, section 4).

    Raises NumericalError naming the position of a row that holds NaN or +inf, or -inf only.
    """
    check_request(logits, params, position)
    if params.greedy:
        largest, tokens = logits.max(dim=-1)  # the first of equal maxima, on every device
    else:
        scaled, largest = process_unchecked(logits, params)
        scaled = scaled + gumbel(params.seed, range(position, position + len(logits)), logits.shape[-1], logits.device)
        tokens = scaled.argmax(dim=-1)
    ids, values = torch.stack((tokens.double(), largest.double())).tolist()  # one copy from the device
    check_finite(values, position)
    return [int(token) for token in ids]


def accept_exact(draft_tokens: Seq[int], choices: Seq[int]) -> Verdict:
    """Keep draft tokens [K] while they equal the target's own choices [K + 1]; the next choice follows them.

    Raises InputError if the lengths disagree, or for what is no list of token ids.
    """
    draft_tokens, choices = check_token_ids("draft_tokens", draft_tokens), check_token_ids("choices", choices)
    if len(choices) != len(draft_tokens) + 1:
        raise InputError(f"choices: expected {len(draft_tokens) + 1}, one more than draft tokens, found {len(choices)}")
    accepted = 0
    while accepted < len(draft_tokens) and draft_tokens[accepted] == choices[accepted]:
        accepted += 1
    return Verdict(accepted, choices[accepted])


def accept(draft_tokens: Array, target_probs: Array, draft_probs: Array | None, uniforms: Array) -> Verdict:
    """Speculative sampling (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1), usable alone.

    `draft_tokens` [K]; `target_probs` [K + 1, V], the target's distribution at each draft position and behind the last;
    `draft_probs` [K, V], the very distributions that the tokens were drawn from, or None if the drafter was certain (a
    point mass on each token); `uniforms` [K + 1] from [0, 1), independent of one another and of the draft.

    Draft token i, x, is kept if uniforms[i] < target_probs[i, x] / draft_probs[i, x]. The first that is not is replaced
    by a draw from the normalised max(0, target_probs[i] - draft_probs[i]); if all are kept, the bonus token is drawn
    from target_probs[K]. That draw inverts the cumulative distribution at uniforms[K] and never gives a token of
    probability 0. If x is drawn from draft_probs, the result has the law of target_probs (appendix A.1). A token that
    was drafted although its draft probability is 0 is rejected.

    Raises InputError naming the argument that has the wrong shape or holds impossible values.
    """
    targets = _distributions("target_probs", target_probs)
    width, vocab_size = targets.shape
    tokens = check_token_ids("draft_tokens", draft_tokens, vocab_size)
    if len(tokens) != width - 1:
        raise InputError(
            f"draft_tokens: expected [{width - 1}], one fewer than rows of target_probs, found [{len(tokens)}]"
        )
    drafts = None
    if draft_probs is not None and width > 1:
        drafts = _distributions("draft_probs", draft_probs).to(targets.device)
        if drafts.shape != (width - 1, vocab_size):
            raise InputError(f"draft_probs: expected {[width - 1, vocab_size]}, found {list(drafts.shape)}")
    draws = real_tensor("uniforms", uniforms).to(targets.device, torch.float64)
    if draws.shape != (width,):
        raise InputError(f"uniforms: expected [{width}], one for each row of target_probs, found {list(draws.shape)}")
    for value in draws.tolist():
        if not 0.0 <= value < 1.0:
            raise InputError(f"uniforms: expected numbers in [0, 1), found {value}")
    return _accept(torch.tensor(tokens, dtype=torch.int64, device=targets.device), targets, drafts, draws)


def draft_token(logits: Tensor, params: SamplingParams, position: int, start: int = 0) -> tuple[int, Tensor | None]:
    """A drafter's token for `position` from its own logits [V], and the distribution [V] float32 it was drawn from.

    Coupled acceptance adds the target's own noise to the drafter's processed logits, so that both agree with
    probability at least (1 - TV) / (1 + TV) (arXiv 2408.07978, section 4); no distribution is needed to verify that,
    nor at temperature 0, and None stands in its place. Under rejection the draw is keyed by (DRAFT, position) and the
    distribution belongs into `Draft.probs`. Give the draft's first position as `start` if its length may depend on
    draft tokens of earlier windows that were thrown away: the draw is then a fresh one in every window.

    Raises NumericalError naming the position if the logits hold NaN or +inf, or -inf only.
    """
    check_request(logits, params, position, "[V]")
    rows = logits[None]
    if params.greedy or params.acceptance == "coupled":
        return choose(rows, params, position)[0], None
    probs = process(rows, params, position).softmax(dim=-1)[0]
    uniform = uniforms(params.seed, (position,), Purpose.DRAFT, start, device=logits.device)
    return int(_draw(probs, uniform)), probs


def _accept(tokens: Tensor, target_probs: Tensor, draft_probs: Tensor | None, draws: Tensor) -> Verdict:
    """`accept` on checked tensors of one device: int64 [K], [K + 1, V], [K, V] or None, float64 [K + 1]."""
    drafted = len(tokens)
    column = tokens[:, None]
    target_mass = target_probs[:drafted].gather(1, column)[:, 0].double()  # [K]
    if draft_probs is None:
        kept = draws[:drafted] < target_mass
    else:
        draft_mass = draft_probs.gather(1, column)[:, 0].double()
        kept = draws[:drafted] < target_mass / draft_mass
        kept &= draft_mass > 0
    accepted = kept.to(torch.int64).cumprod(0).sum()
    row = target_probs.index_select(0, accepted[None])[0].double()  # [V]
    weights = row
    if drafted:
        last = accepted.clamp(max=drafted - 1)[None]
        if draft_probs is None:
            refused = torch.zeros_like(row).index_fill_(0, tokens.index_select(0, last), torch.inf)
        else:
            refused = draft_probs.index_select(0, last)[0].double()
        residual = (row - refused).clamp_(min=0)
        # Distributions that differ by rounding only may leave nothing: then the target's row is the residual's limit.
        rejected = (accepted < drafted) & (residual > 0).any()
        weights = torch.where(rejected, residual, row)
    accepted_count, token = torch.stack((accepted, _draw(weights, draws[drafted:]))).tolist()  # one copy
    return Verdict(accepted_count, token)


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative distribution of weights [V] (of any sum) at uniform [1]: a token id, int64 [].

    Only tokens of positive weight are eligible: a parallel sum may differ between neighbours by rounding alone, and
    uniform * total may round up to the total.
    """
    cumulative = weights.double().cumsum(0)
    positive = weights > 0
    reached = (cumulative > uniform * cumulative[-1]) & positive
    ids = torch.arange(len(weights), device=weights.device)
    last = torch.where(positive, ids, 0).max()
    return torch.where(reached, ids, last).min()


def _distributions(name: str, value: Array) -> Tensor:
    """Checked rows of probabilities, float64 [n, V]."""
    probs = real_tensor(name, value).to(torch.float64)
    if probs.dim() != 2 or 0 in probs.shape:
        raise InputError(f"{name}: expected rows of probabilities, [n, V], found {list(probs.shape)}")
    if not bool((probs >= 0).all()):  # false for NaN, too
        worst = probs[~(probs >= 0)][0].item()
        raise InputError(f"{name}: expected probabilities of at least 0, found {worst}")
    for row, total in enumerate(probs.sum(dim=-1).tolist()):
        if not abs(total - 1.0) <= _TOLERANCE:
            raise InputError(f"{name}: expected rows that sum to 1, found {total:.6g} in row {row}")
    return probs
