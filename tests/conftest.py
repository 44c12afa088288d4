"""One thread, no progress bars, the order of the files, and `--env` for the contract:

    python -m pytest tests/test_env_contract.py --env package.module:Class
"""

import os
import sys
from pathlib import Path

# Tests run beside training, and sums must not depend on the number of cores. By the environment,
# which torch and transformers read when they are imported: importing them here would cost whoever
# checks an environment, which needs neither, several times what the check does.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

# `pytest` alone, unlike `python -m pytest`, looks neither into the checkout nor into the current
# folder.
for folder in (str(Path(__file__).parent.parent), ""):
    if folder not in sys.path:
        sys.path.insert(0, folder)

from minragen.envs import REGISTRY  # noqa: E402  the loop above finds it

# The order in which the specification is read: first how episodes become tokens, then the step.
ORDER = ("test_rollout", "test_step", "test_starpo", "test_museum", "test_models", "test_train",
         "test_config", "test_diagnostics", "test_eval", "test_warmup", "test_envs",
         "test_env_contract")


def pytest_collection_modifyitems(items):
    """Sort the files by ORDER; the single environments and the README come last."""
    items.sort(key=lambda item: (*ORDER, item.path.stem).index(item.path.stem))


def pytest_addoption(parser):
    parser.addoption("--env", action="append", metavar="NAME",
                     help="environment for the contract tests, as envs.make takes it; may be "
                          "repeated [every registered one]")


def pytest_generate_tests(metafunc):
    """A test that takes `env_name` runs once for each `--env`."""
    if "env_name" in metafunc.fixturenames:
        metafunc.parametrize("env_name", metafunc.config.getoption("env") or sorted(REGISTRY))
