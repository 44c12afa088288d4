"""The papers' findings, tested by running them: `python -m findings --help`."""
