"""The contract of the ten environments inside each layer; test_layers.py has it inside two."""

from test_env_contract import (  # noqa: F401  collected here, too
    TestBudget,
    TestGroups,
    TestHostileAnswers,
    TestLife,
    TestRandomPolicy,
    TestSeeds,
    TestShallowPlayer,
    TestSolver,
)

from minragen.envs import REGISTRY

LAYERS = ("action_noise,probability=0.3", "observation_dropout,probability=0.3")
ENV_NAMES = [f"{name} {layers}" for name in sorted(REGISTRY) for layers in LAYERS]
