"""More cases of what other files check a part of: Lean and the sandbox, layers, models, warm-ups.

ENV_NAMES is what the contract at the top is about: the ten environments inside a layer;
test_layers.py has them inside two.
"""

import functools
from collections import defaultdict

import pytest
import test_lean
from test_attention import assert_compiled_alike
from test_bundled import fresh, loss_and_checksums
from test_env_contract import *  # noqa: F403  the classes that it names, for ENV_NAMES
from test_families import FAMILIES, PAGE, SOME, family, listed_as, measured
from test_lean import DRAWN, THEOREMS, assert_proofs_hold, assert_the_same_in_every_company
from test_sandbox import assert_solutions_pass

from minragen.chat import ChatFrame
from minragen.config import PRESETS, preset
from minragen.envs import REGISTRY, SPLITS
from minragen.run import bundled
from minragen.run.bundled import ASSETS, warm_up, warmup_key
from minragen.run.groups import env_groups
from minragen.run.tiny import tiny_vlm

ENV_NAMES = [f"{name} action_noise,probability=0.3" for name in sorted(REGISTRY)]
packaged = test_lean.packaged


def test_lean_accepts_stored_and_drawn_proofs_and_every_tactic_changes_the_goals(packaged):
    assert_proofs_hold(packaged, [*THEOREMS[1::4], *DRAWN[::6]])


@pytest.mark.parametrize("seed", (1, 2))
def test_a_verdict_is_the_same_in_every_company(seed):
    assert_the_same_in_every_company(seed)


def test_all_solutions_of_humaneval_and_of_generated_problems_pass_in_monty():
    assert_solutions_pass(every=1, generated=30)


def table():
    """A row for each outcome, in the order in which FAMILIES has them."""
    names = defaultdict(list)
    for name in FAMILIES:
        names[listed_as(name) if name in SOME else measured(name)].append(name)
    return "\n".join(f"| {outcome} | {'; '.join(found)} |" for outcome, found in names.items())


class TestEveryFamily:
    """The architectures that test_families.py does not try, as docs/models.md has them."""

    @pytest.mark.parametrize("name", [name for name in FAMILIES if name not in SOME])
    def test_it_works_or_is_refused_as_the_page_says_and_is_never_silently_wrong(self, name):
        assert listed_as(name) == measured(name), f"write into the page:\n{table()}"

    def test_the_page_has_all_of_them_and_no_other(self):
        assert PAGE.endswith(f"\n|---|---|\n{table()}\n"), f"write into the page:\n{table()}"


def test_the_kernels_that_torch_compile_makes_compute_what_the_layers_do(float64):
    assert_compiled_alike(family("Qwen3"), [1, 2])


class TestBundledWeights:
    """They are what the warm-up makes, as far as its first steps show."""

    def test_redoing_the_first_steps_gives_the_same_weights(self):
        policy, frame, groups = fresh("frozenlake")
        losses = warm_up(policy, frame, groups, preset("frozenlake").warmup_steps, stop_after=2)
        loss, checksums = loss_and_checksums("frozenlake")
        assert losses == pytest.approx(loss[:2], rel=1e-4)
        assert bundled.checksums(policy.model) == pytest.approx(checksums, rel=1e-3, abs=1e-3)

    @pytest.mark.parametrize("env", sorted(PRESETS["tiny-vlm"]))
    def test_so_has_the_model_that_sees_and_its_key_is_the_presets(self, env):
        config = preset(env, model="tiny-vlm")
        groups = functools.partial(env_groups, config)
        policy = tiny_vlm([e for split in SPLITS for e in groups(split).envs])
        frame = ChatFrame(policy.tokenizer, max_new_tokens=config.max_new_tokens,
                          image_store=policy.image_store)
        groups = bundled.demonstration_groups(policy, groups)
        path, = ASSETS.glob(f"tiny-vlm-{env}-*")
        key = warmup_key(policy, frame, groups, config.warmup_steps)
        assert path.name == f"tiny-vlm-{env}-{key}.safetensors"
        loss, checksums = loss_and_checksums(f"vlm-{env}")
        losses = warm_up(policy, frame, groups, config.warmup_steps, stop_after=2)
        assert losses == pytest.approx(loss[:2], rel=1e-4) and loss[-1] < 0.2 * loss[0]
        assert bundled.checksums(policy.model) == pytest.approx(checksums, rel=1e-3, abs=1e-3)
