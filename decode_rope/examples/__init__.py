"""Code to start from: a server loop, and adapters for other servers' functions. Each file stands alone."""
