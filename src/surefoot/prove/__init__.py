"""A user's own proof that speculative decoding changes nothing, for one model on one machine: see docs/prove.md."""
