"""Learning algorithms, models and players beyond the reading list (README.md, `more/`)."""
