"""The commands of `python -m decode_rope`, one file each: a module with `add_arguments(parser)` and `run(args) -> int`."""
