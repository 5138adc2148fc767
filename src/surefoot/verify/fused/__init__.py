"""Choosing and accepting tokens on a GPU: Triton kernels, each beside a PyTorch reference of the same signature."""
