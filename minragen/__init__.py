"""minRAGEN: multi-turn agent reinforcement learning (StarPO) in a few flat modules.

Start at README.md.
"""

__version__ = "0.1.0"
