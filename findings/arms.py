"""The arms: configurations that findings compare, as options that differ from a preset's.

Settings were chosen on seeds from 100 on, which are not reported. `{seed}` in an option is the
seed of the run.
"""

# V1's vanilla setting: 8 x 16 episodes, no filter, clip 0.2 on both sides, KL and entropy 0.001,
# GAE(1, 1). The learning rate is three times that of tiny's presets, at which nothing collapses;
# MetaMathQA is where most goes wrong, and cheap.
NO_KL = dict(kl_coef=0.0, kl_estimator="k2")  # the estimator is the preset's: it has no effect
VANILLA = dict(env="metamathqa", filter="none", num_groups=8, group_size=16, mini_batch=32,
               clip_high=0.2, kl_coef=0.001, kl_estimator="k3", entropy_coef=0.001, lr=1.5e-3,
               lr_final=1.0, steps=100, val_every=50, val_size=128, diagnose_every=5)
AS_PPO = dict(algo="ppo", lam=1.0, credit="episode")
PPO = VANILLA | AS_PPO


def keep(share):
    """Train on this share of the groups. With V1's mini-batch of fixed size it is also this share
    of the optimizer steps: an arm of fewer, larger ones shows what that does alone."""
    return dict(filter="top_k", filter_value=share, filter_include_zero=True)


ARMS = {
    "grpo": VANILLA,
    "ppo": PPO,
    "ppo-keep-75": PPO | keep(0.75),
    "ppo-keep-50": PPO | keep(0.5),
    "ppo-keep-25": PPO | keep(0.25),
    "ppo-fewer-updates": PPO | dict(mini_batch=128),
    "grpo-keep-25": VANILLA | keep(0.25),
    "grpo-clip-higher": VANILLA | dict(clip_high=0.28),
    "grpo-no-kl": VANILLA | NO_KL,
    "starpo-s": PPO | keep(0.25) | dict(clip_high=0.28) | NO_KL,
}
HARD = tuple(ARMS)
VANILLAS = ("ppo", "grpo", "frozenlake-ppo", "frozenlake-grpo")
ARMS["frozenlake-grpo"] = VANILLA | dict(env="frozenlake", steps=80, val_every=40)
ARMS["frozenlake-ppo"] = ARMS["frozenlake-grpo"] | AS_PPO
BANDIT = dict(env="bandit", steps=30, val_every=30, val_size=128)
for reversed_arms in (False, True):
    for style in ("free_think", "no_think"):
        ARMS["bandit-" + ("reversed-" if reversed_arms else "") + style.replace("_", "-")] = (
            BANDIT | dict(response_format=style,
                          env_arg=("mixed=False", f"reversed={reversed_arms}")))
THOUGHTS = tuple(name for name in ARMS if name.startswith("bandit-"))
# The stored runs have what the presets were then: FrozenLake in groups of 16, and k3.
EARLIER = dict(group_size=16, kl_estimator="k3")
FIVE = {"bandit": dict(steps=15), "metamathqa": dict(steps=40),
        "countdown": dict(steps=25, num_groups=8, kl_estimator="k3"),
        "frozenlake": dict(steps=30, num_groups=8, **EARLIER),
        "deepcoder": dict(steps=25, num_groups=8)}
FILTERS = {"top-p": dict(filter="top_p", filter_value=0.9),
           "top-k": dict(filter="top_k", filter_value=0.25),
           "min-p": dict(filter="min_p", filter_value=0.5), "none": dict(filter="none")}
for task, sizes in FIVE.items():
    for rule, options in FILTERS.items():
        ARMS[f"{task}-{rule}"] = dict(env=task, val_every=100, val_size=64, diagnose_every=0,
                                      **sizes, **options)
# VAGEN's ablation in small: FrozenLake as a picture.
SEEING = dict(env="frozenlake", model="tiny-vlm", num_groups=8, steps=100, val_every=50,
              diagnose_every=0, **EARLIER)
TOLD = SEEING | dict(response_format="grounding_worldmodeling")
# At VAGEN's weights five described turns pay up to 5 and the goal 1; at these up to 0.3.
PAID_LESS = TOLD | dict(grounding_reward=0.03, worldmodeling_reward=0.03)
ARMS |= {"seeing-no-think": SEEING | dict(response_format="no_think"),
         "seeing-free-think": SEEING, "seeing-told": TOLD,
         "seeing-paid": TOLD | dict(grounding_reward=0.5, worldmodeling_reward=0.5),
         "seeing-paid-less": PAID_LESS, "seeing-gae": PAID_LESS | dict(algo="ppo"),
         "seeing-bi-level": PAID_LESS | dict(algo="bi-level")}
SEEN = tuple(name for name in ARMS if name.startswith("seeing-"))
GRADIENTS = dict(env="frozenlake", filter="none", num_groups=48, gradients_every=5, kl_coef=0.01,
                 steps=10, val_every=10, val_size=64, diagnose_every=0, **EARLIER)
ARMS |= {"gradients": GRADIENTS, "gradients-no-std": GRADIENTS | dict(norm_by_std=False)}
# What the field found since, against the presets, in two environments with several turns.
SHORT = dict(steps=60, val_every=60, diagnose_every=0)
DISTILLED = SHORT | dict(zero_task=True, kl_coef=1.0, entropy_coef=0.0, filter="none", steps=30,
                         val_every=30)
for task in ("frozenlake", "sokoban"):
    ARMS[f"{task}-by-episode"] = SHORT | dict(env=task)
    ARMS[f"{task}-gigpo"] = SHORT | dict(env=task, algo="gigpo")
    # The teacher is the run above with the same seed.
    ARMS[f"{task}-distilled"] = DISTILLED | dict(
        env=task, teacher=f"findings-{task}-by-episode-s{{seed}}")
ARMS["frozenlake-echo"] = SHORT | dict(env="frozenlake", echo_coef=0.03)
STALE = {"bandit": dict(steps=60, val_every=60), "metamathqa": dict(steps=80, val_every=80)}
LATE = {"fresh": {}} | {f"stale-{k}{end}": dict(stale=k, **cap) for k in (1, 4, 16)
                        for end, cap in (("", {}), ("-tis", dict(tis_cap=2.0)))}
for task, sizes in STALE.items():
    for name, options in LATE.items():
        ARMS[f"{task}-{name}"] = dict(env=task, diagnose_every=0, **sizes, **options)
# ---- Claims of the papers that the first round left out ------------------------------------------
# 256 trajectories a step, of 64, 16 or 4 prompts.
MEMBERS = (4, 16, 64)
for task, steps in (("frozenlake", 60), ("metamathqa", 30)):
    for size in MEMBERS:
        ARMS[f"{task}-members-{size}"] = SHORT | dict(
            env=task, algo="ppo", filter="none", num_groups=256 // size, group_size=size,
            steps=steps, val_every=steps, val_size=512)
# Ten actions in up to ten turns, of so many actions at most.
CAPS = (1, 2, 5, 10)
for cap in CAPS:
    ARMS[f"sokoban-cap-{cap}"] = SHORT | dict(
        env="sokoban", max_turns=10, max_actions=10, max_actions_per_turn=cap, max_new_tokens=48,
        max_context=1280)
# As many updates from a fifth or a tenth of the rollouts; `long`: five times the updates.
for task in ("frozenlake", "sokoban"):
    ARMS[f"{task}-reused-5"] = SHORT | dict(env=task, epochs=5, steps=12, val_every=12)
    ARMS[f"{task}-reused-10"] = SHORT | dict(env=task, epochs=10, steps=6, val_every=6)
    ARMS[f"{task}-reused-5-long"] = SHORT | dict(env=task, epochs=5)
TIMED, TIMED_FILTERS = ("frozenlake", "metamathqa"), ("none", "top-p", "top-k")
for task in TIMED:
    for rule in TIMED_FILTERS:
        ARMS[f"{task}-timed-{rule}"] = SHORT | FILTERS[rule] | dict(
            env=task, steps=15, val_every=15, val_size=16)
# V1's ice: a step goes where it should with probability 1/3. The learning rate is GRPO's.
WITH_CRITIC = SHORT | AS_PPO | dict(env="frozenlake", lr=5e-4)
ARMS |= {"frozenlake-critic": WITH_CRITIC,
         "slippery-critic": WITH_CRITIC | dict(env_arg=("slip=0.667",)),
         "slippery-by-episode": SHORT | dict(env="frozenlake", env_arg=("slip=0.667",))}
# They begin with the weights of a run that has collapsed: Adam and the KL's reference are new. Of
# the stored runs of `grpo` only numbers are left.
ARMS["collapsed"] = VANILLA
REPAIR = VANILLA | dict(init_from="findings-collapsed-s{seed}", steps=50)
REPAIRS = {"none": {}, "rate": dict(lr=5e-4), "filter": FILTERS["top-p"],
           "fewer-updates": dict(mini_batch=128)}
for name, options in REPAIRS.items():
    ARMS[f"repair-{name}"] = REPAIR | options
ARMS["repair-frozen"] = REPAIR | dict(lr=0.0)  # what the collapsed policy does on these prompts
# Wider decoders (policies.py).
SIZES = ("0.2m", "1m", "5m")
for size in SIZES:
    own = {} if size == "0.2m" else dict(init_from=f"findings-{size}")
    for rule in ("none", "top-p"):
        ARMS[f"{size}-{rule}"] = FILTERS[rule] | own | dict(
            env="countdown", steps=60, val_every=60, diagnose_every=0)
# Whether the std divides where the better arm pays seldom, as it does, and where both pay for sure.
SURE = ARMS["bandit-none"] | dict(env_arg=("mixed=True", "high_prob=1.0", "high_reward=0.25"))
NO_STD = dict(norm_by_std=False)
ARMS |= {"bandit-no-std": ARMS["bandit-none"] | NO_STD, "sure-none": SURE,
         "sure-no-std": SURE | NO_STD}
# What the warm-up showed (policies.py): environments x formats.
BREADTHS = {"narrow": 1, "pair": 10, "broad": 50}
for arm in VANILLAS:
    task = ARMS[arm]["env"]
    ARMS[f"narrow-{arm}"] = ARMS[arm] | dict(init_from=f"findings-narrow-{task}")
    ARMS[f"broad-{arm}"] = ARMS[arm] | dict(init_from="findings-broad")
    if task == "metamathqa":
        ARMS[f"pair-{arm}"] = ARMS[arm] | dict(init_from="findings-pair")
# ---- A pretrained model --------------------------------------------------------------------------
# SmolLM2-135M, all weights, after a few supervised steps that show it the format. No KL.
SMOLLM2 = dict(model="smollm2", filter="none", group_size=8, mini_batch=32,
               token_budget=8192, clip_high=0.2, lr=1e-5, warmup_steps=8, steps=100, val_every=50,
               val_size=64, diagnose_every=0)
SMOLLM2_BANDIT = SMOLLM2 | dict(env="bandit", num_groups=8, max_new_tokens=32, max_context=512)
SMOLLM2_LAKE = SMOLLM2 | dict(
    env="frozenlake", env_arg=("view=grid", "size=3"), response_format="no_think", num_groups=4,
    max_turns=3, max_actions=6, max_new_tokens=16, max_context=640)
ARMS |= {"smollm2-bandit-grpo": SMOLLM2_BANDIT,
         "smollm2-bandit-no-std": SMOLLM2_BANDIT | NO_STD,
         "smollm2-bandit-ppo": SMOLLM2_BANDIT | AS_PPO,
         "smollm2-bandit-starpo-s": SMOLLM2_BANDIT | AS_PPO | keep(0.25) | dict(clip_high=0.28),
         "smollm2-bandit-top-p": SMOLLM2_BANDIT | FILTERS["top-p"],
         "smollm2-lake-grpo": SMOLLM2_LAKE,
         "smollm2-lake-top-p": SMOLLM2_LAKE | FILTERS["top-p"]}
# ---- Controls: effects planted on purpose --------------------------------------------------------
# The share of successes that bad luck turns into failures is the margin over the success at the end
# of the stored runs; where none had run before (0.2M, SmolLM2), over what we expected.
UNLUCKY = {"frozenlake-by-episode": 0.06, "sokoban-by-episode": 0.063, "grpo": 0.24, "ppo": 0.2,
           "bandit-free-think": 0.052, "seeing-free-think": 0.068, "sokoban-cap-5": 0.12,
           "slippery-by-episode": 0.15, "frozenlake-members-16": 0.05,
           "metamathqa-members-16": 0.05, "0.2m-none": 0.1, "smollm2-bandit-grpo": 0.33,
           # The margin of a mean over FIVE is smaller.
           "bandit-top-p": 0.024, "metamathqa-top-p": 0.022, "countdown-top-p": 0.036,
           "frozenlake-top-p": 0.026, "deepcoder-top-p": 0.055}
for arm, share in UNLUCKY.items():
    # A layer would have a warm-up of its own; the control begins with the arm's.
    ARMS[f"{arm}-unlucky"] = ARMS[arm] | dict(
        init_from=f"findings-start-{arm}",
        layer=(f"findings.plant:BadLuck,probability={share}",))
ARMS["bandit-trapped"] = SHORT | dict(env="bandit", filter="none", stale=16, clip_low=1.0,
                                      clip_high=10.0, dual_clip=0.0)
ARMS["smollm2-bandit-trapped"] = SMOLLM2_BANDIT | {
    name: ARMS["bandit-trapped"][name] for name in ("stale", "clip_low", "clip_high", "dual_clip")}
for arm in ("bandit-free-think", "frozenlake-grpo"):
    ARMS[f"{arm}-brief"] = ARMS[arm] | dict(overlong=0.9)  # long replies are penalised
