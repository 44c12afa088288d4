"""Make the bundled warm-up weights of `tiny` and `tiny-vlm` anew, replacing the old ones.

    python -m lab.assets [tiny-bandit ...]

Needed when prompts, demonstrations, minragen/run/bundled.py or tiny.py have changed.
"""

import copy
import json
import sys
import time
from functools import partial

import numpy as np
import torch
from safetensors.torch import save_file

from minragen.chat import ChatFrame
from minragen.config import PRESETS, preset
from minragen.envs import SPLITS
from minragen.fast.policies import faster
from minragen.run import bundled
from minragen.run.groups import env_groups

MADE = {f"{model}-{env}": (model, env) for model in PRESETS for env in PRESETS[model]}
CHECKSUM_STEPS = 2  # a test repeats this many steps and compares the weights by their checksums


def make_asset(model, name):
    """Warm up a model on one environment with its preset and write its file."""
    for stale in bundled.ASSETS.glob(f"{model}-{name}-*.safetensors"):
        stale.unlink()
    config, start = preset(name, model=model), time.time()
    groups_of = partial(env_groups, config)
    envs = [env for split in SPLITS for env in groups_of(split).envs]
    policy = faster(bundled.UNTRAINED[model](envs))
    frame = ChatFrame(policy.tokenizer, max_new_tokens=config.max_new_tokens,
                      image_store=policy.image_store)
    groups = bundled.demonstration_groups(policy, groups_of)
    key, steps = bundled.warmup_key(policy, frame, groups, config.warmup_steps), config.warmup_steps
    short = copy.deepcopy(policy)
    bundled.warm_up(short, frame, groups, steps, stop_after=CHECKSUM_STEPS)
    losses = bundled.warm_up(policy, frame, groups, steps)
    path = bundled.ASSETS / f"{bundled.asset_stem(model, groups)}-{key}.safetensors"
    # Tied weights stand once; the metadata says how the weights came about.
    state = {name: p.detach().half() for name, p in policy.model.named_parameters()}
    save_file(state, path, metadata={"loss": json.dumps(losses),
                                     "probe": json.dumps(bundled.checksums(short.model))})
    print(f"{model}-{name}: loss {losses[0]:.3f} -> {np.mean(losses[-20:]):.3f} nats a token, "
          f"{policy.model.num_parameters():,} parameters, {time.time() - start:.0f} s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in sys.argv[1:] or MADE:
        make_asset(*MADE[chosen])
