"""The same results sooner: prefix trees, and a decoder without padding."""
