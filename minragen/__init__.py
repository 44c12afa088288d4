"""minRAGEN: multi-turn agent reinforcement learning (StarPO). Start at README.md."""

__version__ = "0.1.0"
