"""Choosing and accepting tokens on a GPU: Triton kernels, each beside a plain PyTorch reference of the same signature."""
