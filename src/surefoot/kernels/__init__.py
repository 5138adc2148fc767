"""Tensors in, tensors out: the arithmetic of the decoder, without state.

Decode and verify share one promise, on which token-exactness rests: **a row's bits do not depend on how many rows are
computed with it**. Each module says how it keeps that promise; `tests/unit/test_rows.py` tries to break it.
Everything but the linear layers' weights, inputs and outputs is float32.
"""
