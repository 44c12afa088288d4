"""One thread, no progress bars, runs in a temporary folder, and options for the two contracts:

    python -m pytest tests/test_env_contract.py --env package.module:Class
    python -m pytest tests/test_algo_contract.py --algo package.module:preset
"""

import json
import os
import random
import shutil
import sys
from pathlib import Path

import pytest

# One thread: sums must not depend on the number of cores. torch and transformers read this at their
# import, which is not here because the contract of an environment needs neither and it is slow.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "CI": "1"}

# `pytest`, unlike `python -m pytest`, looks neither into the checkout nor into the current folder;
# files of long/ import those of environments/.
TESTS = Path(__file__).parent
for folder in (str(TESTS / "environments"), str(TESTS.parent), ""):
    if folder not in sys.path:
        sys.path.insert(0, folder)

from minragen.config import ALGOS  # noqa: E402  the loop above finds it
from minragen.envs import REGISTRY, make  # noqa: E402

# What the contract is about. toys.py shows two of the ten as images, which changes nothing in SAME.
ALL = (*sorted(REGISTRY), "toys:Lake", "toys:Room")
SAME = ("TestSplits", "TestSolver", "TestExample")


def pytest_ignore_collect(collection_path, config):
    """test_accelerator.py needs a process of its own: autograd makes its queues at the first
    backward pass, for the kinds of devices known then, and a process with two kinds cannot fork
    others that learn (several.py). `make test-all` runs it last."""
    if collection_path.name == "test_accelerator.py" and (
            "test_accelerator" not in " ".join(config.args)):
        return True
    return None


@pytest.fixture(autouse=True)
def seeded():
    """Each test draws the same numbers, whatever ran before it in the process."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture
def runs(request, tmp_path, monkeypatch):
    """A runs/ for the test alone, and one temporary cache of models for all tests. The page of a
    run is drawn for a test that takes `drawn`, too."""
    keep_runs_in(tmp_path / "runs", request.getfixturevalue("tmp_path_factory"), monkeypatch,
                 "drawn" in request.fixturenames)
    return tmp_path / "runs"


@pytest.fixture
def drawn():
    """Asks `runs` for pages."""


def keep_runs_in(folder, tmp_path_factory, monkeypatch, drawn=False):
    monkeypatch.setattr("minragen.run.runs.RUNS", folder)
    monkeypatch.setenv("MINRAGEN_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    if not drawn:
        monkeypatch.setattr("minragen.look.report.write", lambda *_: "report.html")


def run_apart(tmp_path_factory, line, *more):
    """Train with these options, a line and words, and return the run's folder."""
    from minragen.run.start import main

    folder = tmp_path_factory.mktemp("apart")
    with pytest.MonkeyPatch.context() as patch:
        keep_runs_in(folder, tmp_path_factory, patch)
        main(["--run", "a", *line.split(), *more])
    return folder / "a"


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A folder with a run of two steps that several tests copy."""
    from training import BRIEF

    return run_apart(tmp_path_factory, "--steps 2", *BRIEF)


@pytest.fixture
def begun(finished, runs):
    """A copy of that run as runs/a."""
    shutil.copytree(finished, runs / "a")
    return runs / "a"


@pytest.fixture
def float64(monkeypatch):
    """Compute in float64, despite `.float()` and transformers; the sampler hands out float32."""
    import torch

    from minragen import rollout

    def sample(*arguments, real=rollout.sample_tokens):
        tokens, logprobs = real(*arguments)
        return tokens, logprobs.to(torch.float32)

    def norm(self, x):
        return self.weight * x * (x.square().mean(-1, True) + self.variance_epsilon).rsqrt()

    for kind in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        monkeypatch.setattr(f"transformers.models.{kind.lower()}.modeling_{kind.lower()}."
                            f"{kind}RMSNorm.forward", norm)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(rollout, "sample_tokens", sample)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def parsed(*argv):
    """The Config of a command line, by default for tiny."""
    from minragen.config import from_options, parse
    from minragen.run import start  # noqa: F401  it adds the estimators of more/

    given = parse([*argv])
    del given["resume"], given["print_config"]
    return from_options({"model": "tiny"} | given)


def message(*argv):
    """The sentence that a user reads who gives these options, never a traceback."""
    from minragen.run.start import main

    with pytest.raises(SystemExit) as stop:
        main([*argv])
    said = str(stop.value)
    assert said.startswith("error: ") and "\n" not in said
    return said


def begin(name, seed=0, split="train", budget=None, **options):
    """An environment at the start of an episode."""
    env = make(name, split, budget, **options)
    env.reset(seed=seed)
    return env


def write(path, *records):
    """Write a file of JSON records. Returns its path as a text."""
    Path(path).write_text("\n".join(map(json.dumps, records)))
    return str(path)


def pytest_addoption(parser):
    parser.addoption("--env", action="append", metavar="NAME",
                     help="environment for the contract tests, as envs.make takes it; may be "
                          "repeated [every registered one, and the images of toys.py]")
    parser.addoption("--algo", action="append", metavar="NAME",
                     help="preset for the contract of algorithms, as --algo of a training takes "
                          "it; may be repeated [every preset]")


def pytest_generate_tests(metafunc):
    """Repeat tests of `env_name` for each --env or ENV_NAMES, of `algo_name` for each --algo."""
    if "env_name" in metafunc.fixturenames:
        metafunc.parametrize("env_name", getattr(metafunc.module, "ENV_NAMES", None)
                             or metafunc.config.getoption("env")
                             or (ALL if getattr(metafunc.cls, "__name__", "") not in SAME else
                                 sorted(REGISTRY)))
    if "algo_name" in metafunc.fixturenames:
        metafunc.parametrize("algo_name", metafunc.config.getoption("algo") or [*ALGOS])
