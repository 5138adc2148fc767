"""Verification as pure mathematics: distributions, keyed randomness, and the acceptance rules.

Usable alone: `from surefoot import verify`, then `verify.accept(...)`. See `acceptance` for the rules, `distribution`
for how sampling parameters become a distribution, `philox` for where the random numbers come from.
"""

from surefoot.verify.acceptance import accept, accept_exact, choose, draft_token, verify
from surefoot.verify.arrays import Array
from surefoot.verify.distribution import probabilities, process
from surefoot.verify.philox import Purpose, gumbel, uniforms

__all__ = [
    "Array",
    "Purpose",
    "accept",
    "accept_exact",
    "choose",
    "draft_token",
    "gumbel",
    "probabilities",
    "process",
    "uniforms",
    "verify",
]
