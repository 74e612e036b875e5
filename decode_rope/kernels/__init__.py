"""Triton kernels. They import triton alone; `decode_rope.launch` chooses their compile-time facts and launches them."""
