"""Triton kernels. Nothing here imports torch; launching them is `prepared`'s job."""
