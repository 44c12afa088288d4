"""The same algorithm on more: LoRA, vision, windows, described states, servers."""
