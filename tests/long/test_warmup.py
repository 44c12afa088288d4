"""The bundled weights are what the warm-up makes, as far as its first steps show."""

import functools

import pytest
from test_bundled import fresh, loss_and_checksums

from minragen.chat import ChatFrame
from minragen.config import PRESETS, preset
from minragen.envs import SPLITS
from minragen.run import bundled
from minragen.run.bundled import ASSETS, warm_up, warmup_key
from minragen.run.groups import env_groups
from minragen.run.tiny import tiny_vlm


class TestBundledWeights:
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
