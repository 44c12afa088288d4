"""The same algorithm on more: LoRA, vision, windowed contexts, described states, servers, loggers."""
