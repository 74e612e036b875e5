"""The public functions and objects."""
