"""Verification as pure mathematics: distributions, keyed randomness, and the acceptance rules.

Usable alone: `from surefoot import verify`, then `verify.accept(...)`. See `acceptance` for the rules, `distribution`
for how sampling parameters become a distribution, `rules` for what the history does before that, `philox` for where the
random numbers come from.
"""

from surefoot.verify.acceptance import accept, accept_exact, choose, draft_token, verify
from surefoot.verify.arrays import Array
from surefoot.verify.distribution import probabilities, process
from surefoot.verify.logprobs import token_logprobs
from surefoot.verify.philox import Purpose, gumbel, uniforms
from surefoot.verify.rules import Rules, draft_row, ruled

__all__ = [
    "Array",
    "Purpose",
    "Rules",
    "accept",
    "accept_exact",
    "choose",
    "draft_row",
    "draft_token",
    "gumbel",
    "probabilities",
    "process",
    "ruled",
    "token_logprobs",
    "uniforms",
    "verify",
]
