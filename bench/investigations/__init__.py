"""What somebody uses who looks into a number: `python -m bench investigate --help`."""
