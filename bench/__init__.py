"""Benchmarks of decode_rope against every public peer that is installed: `python -m bench --help`."""
