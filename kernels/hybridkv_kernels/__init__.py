"""Triton kernels of a multi-group paged KV cache with references that run without Triton.

Import an op from its module; importing this package loads neither torch nor triton.
"""
