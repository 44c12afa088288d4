"""What can be set, and to what: Config, the presets, the command line, the folder of a run.

    python -m minragen.train --algo starpo-s --print-config
    python -m minragen.train --help

Reading order: `Config` (every field is an option), `PRESETS` (an environment's numbers), `ALGOS`
(an algorithm is a handful of choices that differ from the base), `parse`, `check`.
docs/algorithms.md tells the same table with equations and papers.
"""

import argparse
import ast
import dataclasses
import json
import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from minragen import starpo
from minragen.envs import EnvGroups, nearest, parse_mixture
from minragen.models import RESPONSE_FORMATS, choose, descriptions, parts_of
from minragen.rollout import CONTEXTS, Sampling
from minragen.warmup import default_steps

RUNS = Path("runs")
# Instance seeds of run seed s begin at TRAIN_SEED + s * TRAIN_SEED_STRIDE; validation's at 0.
TRAIN_SEED, TRAIN_SEED_STRIDE = 2**41, 2**24


# Advantages from returns compared within groups, from returns summed up, and with a critic.
GROUPED = ("grpo", "rloo", "reinforce_pp_baseline")
REINFORCE = ("reinforce", "reinforce_pp")
WITH_CRITIC = ("gae", "bi_level_gae", "turn_gae")
# What is measured of each episode, and what of it is a group's score.
FILTER_METRICS = {"reward_std": ("returns", "std"), "reward": ("returns", "mean"),
                  "length": ("lengths", "mean"), "entropy": ("entropy", "mean"),
                  "entropy_std": ("entropy", "std")}
# An algorithm is what it changes in the base Config (and a critic learns better at its own rate).
GAE = dict(advantages="gae", credit="turn", lam=0.95, lr=3e-4)
ALGOS = {
    "grpo": dict(),
    "ppo": GAE,
    "dr-grpo": dict(norm_by_std=False, aggregation="seq-mean-token-sum-norm"),
    "dapo": dict(filter_value=1.0, resample=3, overlong=0.2, dual_clip=0.0, entropy_coef=0.0,
                 aggregation="token-mean"),
    "brpo": dict(advantages="reinforce", reward_norm="mean_std", reward_norm_over="batch"),
    "arpo": dict(advantages="reinforce"),
    "rloo": dict(advantages="rloo"),
    "reinforce-pp": dict(advantages="reinforce_pp", kl_reward_coef=0.001),
    "gspo": dict(ratio="sequence", clip_low=3e-4, clip_high=4e-4, dual_clip=0.0,
                 aggregation="seq-mean-token-mean"),
    "starpo-s": GAE | dict(filter="top_k", filter_value=0.25, filter_include_zero=True),
    "bi-level": GAE | dict(advantages="bi_level_gae", gamma_turn=0.95),
    "turn-ppo": GAE | dict(advantages="turn_gae"),
}
ALGO_NAMES = tuple(ALGOS)


def opt(default, text, choices=None, least=0, most=2**31):
    """A field with its help, the values it may have, or the bounds of a number."""
    return field(default=default, metadata=dict(help=text, choices=choices, least=least, most=most))


@dataclass(frozen=True)
class Config:
    """Every field is an option: `max_new_tokens` is `--max-new-tokens`. 0 or -1 marks 'derived'."""

    env: str = opt("frozenlake", "environment, mixture (a,b or a=12,b=4), package.module:Class or "
                                 "Gymnasium id")
    run: str = opt("", "name of the folder under runs/; empty: derived from env, algo, model and "
                       "seed")
    seed: int = opt(0, "everything random in the run follows from it", most=2**20 - 1)
    algo: str = opt("grpo", "preset of the algorithm: which choices below it makes", ALGO_NAMES)
    model: str = opt("", "tiny, smollm2, a folder or a Hugging Face id; empty: by the machine")
    device: str = opt("", "cpu, cuda, ...; empty: cuda if there is one")
    threads: int = opt(0, "CPU threads of PyTorch; 0: one for tiny, else all", most=1024)
    steps: int = opt(100, "updates of the policy", least=1)
    warmup_steps: int = opt(-1, "supervised steps on weak play before RL; -1: by the model, "
                                "0: none", least=-1)
    # -- environment
    env_arg: tuple = opt((), "option of the environment, name=value or env.name=value; may be "
                             "repeated")
    max_turns: int = opt(0, "replies per episode; 0: the environment's own")
    max_actions_per_turn: int = opt(0, "actions executed from one reply; 0: the environment's own")
    max_actions: int = opt(0, "actions per episode; 0: the environment's own")
    response_format: str = opt("free_think", "what a reply looks like", RESPONSE_FORMATS)
    grounding_reward: float = opt(0.0, "paid a turn for its observation, times F1 (VAGEN: 0.5); "
                                       "validation never pays it")
    worldmodeling_reward: float = opt(0.0, "paid a turn for its prediction, times F1 (VAGEN: 0.5); "
                                           "validation never pays it")
    # -- rollout
    num_groups: int = opt(16, "P: prompts (instances) per step", least=1, most=2**16)
    group_size: int = opt(16, "G: trajectories per prompt", least=1, most=2**16)
    temperature: float = opt(1.0, "of sampling while training; >0", least=1e-4)
    top_k: int = opt(0, "sample among the k most probable tokens; 0: all")
    top_p: float = opt(1.0, "sample among the most probable tokens that hold this mass")
    max_new_tokens: int = opt(24, "tokens per reply", least=1, most=2**16)
    max_context: int = opt(512, "tokens per conversation", least=2, most=2**24)
    max_rows: int = opt(256, "conversations in one batch of generation", least=1)
    context: str = opt("full", "what a turn sees: the whole conversation, its last turns as chat, "
                               "or one message with its last turns as text", CONTEXTS)
    window: int = opt(3, "limited and single_turn: turns shown, this one included", least=1)
    # -- which groups
    filter: str = opt("top_p", "which groups are trained on", starpo.FILTERS)
    filter_value: float = opt(0.9, "top_p: share of the summed scores; top_k: share of the groups; "
                                   "top_k_abs: number of groups; min_p: share of the best score")
    filter_select: str = opt("largest", "which end of the scores is kept", ("largest", "smallest"))
    filter_metric: str = opt("reward_std", "score of a group: standard deviation or mean over its "
                                           "episodes", tuple(FILTER_METRICS))
    filter_include_zero: bool = opt(False, "whether groups of score 0 are candidates")
    resample: int = opt(0, "DAPO's dynamic sampling: further rollouts per step, at most, in place "
                           "of groups without spread", most=100)
    # -- rewards
    credit: str = opt("episode", "where a return is paid: on the last token of the episode, or "
                                 "turn by turn", ("episode", "turn"))
    reward_norm: str = opt("identity", "what is done to the episodes' returns",
                           starpo.REWARD_NORMS)
    reward_norm_over: str = opt("group", "whose mean and std reward_norm takes",
                                ("group", "batch"))
    overlong: float = opt(0.0, "DAPO's overlong shaping: last share of max_new_tokens in which a "
                               "reply is punished, up to -1; 0: none", most=0.99)
    kl_reward_coef: float = opt(0.0, "weight of the KL (k1) to the model before RL in the reward "
                                     "of each token")
    kl_target: float = opt(0.0, "nats per token; >0: kl_reward_coef adapts to hold it")
    kl_horizon: float = opt(10000.0, "trajectories in which an adaptive coefficient may double or "
                                     "so", least=1)
    # -- learning
    lr: float = opt(3e-4, "learning rate of the policy")
    lr_final: float = opt(1.0, "share of the learning rates left at the last step, linearly "
                               "reached")
    critic_lr: float = opt(1e-3, "learning rate of the critic (the estimators with gae only)")
    advantages: str = opt("grpo", "estimator of the advantages",
                          (*GROUPED, *REINFORCE, *WITH_CRITIC))
    norm_by_std: bool = opt(True, "grpo: divide by the group's standard deviation")
    gamma: float = opt(1.0, "discount per sampled token", most=1)
    lam: float = opt(1.0, "gae: lambda per time step", most=1)
    gamma_turn: float = opt(1.0, "bi_level_gae, turn_gae, credit per turn in the turn-wise "
                                 "contexts: discount per turn", most=1)
    advantage_mask: str = opt("response", "tokens that are time steps of gae: the sampled ones, or "
                                          "all (an ablation of VAGEN)", ("response", "all"))
    soft_reweight: bool = opt(False, "advantages times the group's share of the largest spread")
    length_weight: bool = opt(False, "advantages divided by the episode's share of the mean length")
    loss_scaling: str = opt("none", "policy loss times the share of groups kept, or its root",
                            starpo.LOSS_SCALINGS)
    zero_task: bool = opt(False, "advantages 0: what do the regularisers do alone? (an ablation)")
    ratio: str = opt("token", "importance ratio of each token, or one per row (GSPO)",
                     ("token", "sequence"))
    clip_low: float = opt(0.2, "ratio is clipped to [1 - low, 1 + high]")
    clip_high: float = opt(0.28, "ratio is clipped to [1 - low, 1 + high]")
    dual_clip: float = opt(3.0, "bound on the loss of bad tokens; >1, or 0 for none")
    aggregation: str = opt("token-mean", "how the losses of tokens become one number",
                           starpo.AGGREGATIONS)
    loss_mask: str = opt("response", "tokens in the loss: the sampled ones, or all (an ablation of "
                                     "VAGEN)", ("response", "all"))
    value_clip: float = opt(0.5, "largest trusted move of a value in one update")
    entropy_coef: float = opt(0.001, "weight of the entropy bonus")
    kl_coef: float = opt(0.0, "weight of the KL to the model before RL; 0: no reference model is "
                              "loaded")
    kl_estimator: str = opt("k3", "how the KL in the loss is estimated, k2 or k3")
    epochs: int = opt(1, "passes over a batch", least=1)
    mini_batch: int = opt(64, "rows (trajectories, or turns in the turn-wise contexts) per "
                              "optimizer step", least=1)
    token_budget: int = opt(2400, "padded tokens per forward pass of the learner; changes speed "
                                  "and memory only", least=1)
    max_grad_norm: float = opt(1.0, "gradients are clipped to this global norm", least=1e-4)
    # -- measuring
    val_size: int = opt(256, "held-out instances per validation", least=1, most=2**16)
    val_temperature: float = opt(0.5, "of sampled validation; greedy is always measured too")
    val_every: int = opt(20, "steps between validations; also before the first and after the last",
                         least=1)
    diagnose_every: int = opt(10, "steps between measurements of what reasoning says about its "
                                  "prompt; also at the first; 0: never")
    diagnose_samples: int = opt(64, "reasonings in such a measurement; 0: all", most=2**16)
    gradients_every: int = opt(0, "steps between analyses of the gradient by reward spread; also "
                                  "at the first; 0: never")
    save_every: int = opt(20, "steps between checkpoints; also after the last", least=1)


# An environment's preset is complete: `--env NAME` alone is enough. Values are for the model in the
# box.
PRESETS = {
    "bandit": dict(steps=30, lr=3e-4, max_new_tokens=24, max_context=256),
    "frozenlake": dict(steps=70, lr=5e-4, lr_final=0.1, max_new_tokens=24, max_context=512),
    "sokoban": dict(steps=50, lr=5e-4, lr_final=0.1, max_new_tokens=24, max_context=640,
                    val_every=25),
    "sudoku": dict(steps=40, warmup_steps=300, lr=5e-4, lr_final=0.1, num_groups=8,
                   max_new_tokens=24, max_context=768),
    "countdown": dict(steps=160, lr=5e-4, lr_final=0.1, max_new_tokens=32, max_context=128,
                      val_every=40),
    # What earns least is longest: a mean over tokens pushes down what is sampled, on average.
    "webshop": dict(steps=60, warmup_steps=1200, lr=5e-4, lr_final=0.1, group_size=8,
                    aggregation="seq-mean-token-mean", max_new_tokens=40, max_context=1280,
                    val_every=30),
    "searchqa": dict(steps=50, warmup_steps=600, lr=5e-4, lr_final=0.1, max_new_tokens=24,
                     max_context=512, val_every=25),
    "lean": dict(steps=20, warmup_steps=300, lr=5e-4, lr_final=0.1, num_groups=8,
                 max_new_tokens=72, max_context=1024),
    "deepcoder": dict(steps=40, warmup_steps=200, lr=5e-4, lr_final=0.1, num_groups=8,
                      max_new_tokens=48, max_context=256),
    "metamathqa": dict(steps=40, warmup_steps=300, lr=5e-4, lr_final=0.1, num_groups=8,
                       max_new_tokens=64, max_context=768),
}
# What changes for a pretrained model: RAGEN V2's rates, shorter batches, room for longer replies.
PRETRAINED = dict(warmup_steps=-1, lr=1e-6, critic_lr=1e-5, num_groups=8, mini_batch=32,
                  max_new_tokens=128, max_context=2048, token_budget=8192)
# What each part of a format that describes the state adds, in tokens: enough for the longest of the
# ten environments, in all turns, together with what the prompt says of the language.
DESCRIPTION = dict(max_new_tokens=48, max_context=768)


def preset(env="frozenlake", algo="grpo", model="tiny", response_format="free_think"):
    """The complete Config of an environment, an algorithm, a model and a response format, before
    any option of the user's."""
    layers, names = {}, [part.partition("=")[0].strip() for part in env.split(",")]
    for name in names:
        # A mixture takes the larger of each number. A choice (a string) is for its own environment
        # alone.
        for key, value in PRESETS.get(name, {}).items():
            if len(names) == 1 or not isinstance(value, str):
                layers[key] = max(value, layers.get(key, value))
    if algo not in ALGOS:
        raise ValueError(nearest("algo", algo, list(ALGOS)))
    layers.update(ALGOS[algo])
    if model != "tiny":
        layers.update(PRETRAINED)
    for name, more in DESCRIPTION.items():
        count = len(descriptions(response_format))
        layers[name] = layers.get(name, getattr(Config, name)) + count * more
    return Config(env=env, algo=algo, model=model, response_format=response_format, **layers)


def parse(argv):
    """Command line -> (Config, resume, the options that differ from the preset, why this model).

    raises: ValueError with the nearest known name for an unknown option, environment, algorithm or
        model
    """
    parser = argparse.ArgumentParser(
        prog="minragen.train", allow_abbrev=False, argument_default=argparse.SUPPRESS,
        description="Train a language-model agent. Defaults depend on --env.")
    parser.error = _usage_error
    parser.add_argument("--resume", action="store_true", default=False,
                        help="go on from runs/NAME/checkpoint")
    parser.add_argument("--print-config", action="store_true", default=False,
                        help="say what would be set, and why, and exit")
    fields = dataclasses.fields(Config)
    for f in fields:
        kind = (dict(action="append") if f.type is tuple else
                dict(type=_boolean if f.type is bool else f.type))
        parser.add_argument("--" + f.name.replace("_", "-"),
                            help=f"{f.metadata['help']} [{f.default}]", **kind)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        known = ["--" + f.name.replace("_", "-") for f in fields] + ["--resume", "--print-config"]
        raise ValueError(nearest("option", unknown[0].partition("=")[0], known))
    given = vars(given)
    show = given.pop("print_config")
    if "env_arg" in given:
        given["env_arg"] = tuple(given["env_arg"])
    if given.pop("resume"):
        config = resumed_config(given)
        base = preset(config.env, config.algo, config.model, config.response_format)
        if show:
            print(explain(config, given))
            sys.exit()
        return config, True, differences(config, base), f"model {config.model} as the run began"
    model, _, why = choose(given.get("model", ""), given.get("device", ""))
    base = preset(given.get("env", Config.env), given.get("algo", Config.algo), model,
                  given.get("response_format", Config.response_format))
    config = dataclasses.replace(base, **{**given, "model": model})
    check(config)
    if show:
        print(explain(config, given))
        sys.exit()
    return config, False, differences(config, base), why


def explain(config, given):
    """The whole Config as text: what differs from the base, through whom, then the rest."""
    algo, model = ALGOS[config.algo], PRETRAINED if config.model != "tiny" else {}
    lines, rest = [], []
    for f in dataclasses.fields(config):
        if f.name in ("env", "algo", "model"):
            continue
        value = getattr(config, f.name)
        line = f"{f.name.replace('_', '-'):22} {value!r:14}"
        through = ("you" if f.name in given else f"model {config.model}" if f.name in model else
                   f"algo {config.algo}" if f.name in algo else f"env {config.env}")
        if f.name in DESCRIPTION and descriptions(config.response_format) and f.name not in given:
            through = f"env {config.env} and format {config.response_format}"
        if value == f.default:
            rest.append(line.rstrip())
        else:
            lines.append(f"{line} base {f.default!r:14} through {through}")
    title = f"{config.env} with {config.algo} and model {config.model}: what differs from the base"
    return "\n".join([title, *lines, "", "the rest is the base", *rest])


def differences(config, base):
    """{field: value} where two Configs differ, but for what only names a run."""
    return {k: v for k, v in vars(config).items()
            if v != getattr(base, k) and k not in ("run", "seed", "device")}


def _usage_error(message):
    raise ValueError(message[0].lower() + message[1:] + ". See --help.")


def _boolean(text):
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected true or false")
    return text.lower() == "true"


def check(config):
    """Refuse what cannot work, before anything is built. Raises ValueError with one sentence."""
    for f in dataclasses.fields(config):
        check_field(f, getattr(config, f.name))
    instances = config.steps * config.num_groups * (1 + config.resample)
    if instances > TRAIN_SEED_STRIDE:
        raise ValueError(f"steps * num_groups * (1 + resample): got {instances}, expected at most "
                         f"{TRAIN_SEED_STRIDE}, the instances that a seed has.")
    if config.run and not re.fullmatch(r"[\w+=-][\w.+=-]{0,99}", config.run):
        raise ValueError(f"bad run name {config.run!r}: expected up to 100 letters, digits and "
                         f"-_.+= only.")
    check_algorithm(config)
    Sampling(config.temperature, config.top_k, config.top_p)
    for split, groups in (("train", config.num_groups), ("val", config.val_size)):
        build_groups(config, split, groups, 1)
    check_state_reward(config)


def check_state_reward(config):
    """Refuse to pay for what the form has no part for, or an environment nothing to compare
    with."""
    for option, part in (("grounding_reward", "observation"),
                         ("worldmodeling_reward", "prediction")):
        if getattr(config, option) == 0:
            continue
        if part not in parts_of(config.response_format):
            fitting = " or ".join(f for f in RESPONSE_FORMATS if part in parts_of(f))
            raise ValueError(f"{option} pays for the {part}, which the response_format "
                             f"{config.response_format} does not have. Use --response-format "
                             f"{fitting}.")
        groups = build_groups(config, "val", len(env_names(config)), 1)
        for name, env in zip(groups.names, groups.envs):
            if not env.relation_weights:
                raise ValueError(f"{option}: the environment {name} has no relations that the "
                                 f"{part} could be compared with. Leave it 0.")


def check_algorithm(config):
    """Refuse choices that contradict each other. Raises ValueError with one sentence."""
    check_takes_part(config)
    if config.advantages in GROUPED and config.group_size < 2:
        raise ValueError(f"{config.advantages} compares the members of a group: got group_size 1, "
                         f"expected at least 2.")
    compares = (config.filter != "none" and config.filter_metric.endswith("std")
                or config.soft_reweight)
    if compares and config.group_size < 2:
        raise ValueError("the spread within a group chooses or weighs it: got group_size 1, "
                         "expected at least 2, or --filter none without soft_reweight.")
    if config.advantages in GROUPED and config.credit == "turn":
        raise ValueError(f"{config.advantages} compares whole episodes: got credit turn, expected "
                         f"episode, or one of {', '.join(REINFORCE + WITH_CRITIC)}.")
    if config.reward_norm != "identity" and config.credit == "turn":
        raise ValueError(f"reward_norm {config.reward_norm} normalises the returns of episodes: "
                         f"got credit turn, expected episode.")
    if config.advantages in ("bi_level_gae", "turn_gae") and config.context != "full":
        raise ValueError(f"{config.advantages} looks from turn to turn: got context "
                         f"{config.context}, in which every turn is a row by itself, expected "
                         f"full.")
    if config.filter in ("top_p", "min_p") and config.filter_metric == "reward":
        raise ValueError(f"filter {config.filter} takes shares of scores, and rewards may be "
                         f"negative: take top_p_softmax or top_k with filter_metric reward.")
    if config.filter == "top_k_abs" and config.filter_value != int(config.filter_value):
        raise ValueError(f"filter top_k_abs: got filter_value {config.filter_value}, expected a "
                         f"whole number of groups.")
    if config.resample and (config.filter, config.filter_value, config.filter_metric,
                            config.filter_include_zero) != ("top_p", 1.0, "reward_std", False):
        raise ValueError("resample plays on for groups with spread: expected the filter that keeps "
                         "just those, filter top_p with filter_value 1 of reward_std.")
    if config.ratio == "sequence" and config.advantages not in GROUPED:
        raise ValueError(f"ratio sequence goes with one advantage per row: got {config.advantages},"
                         f" expected one of {', '.join(GROUPED)}.")
    nothing = torch.zeros(1)  # the functions themselves say what they refuse
    starpo.kl_loss(nothing, nothing, config.kl_estimator)
    starpo.policy_loss(nothing, nothing, nothing, dual_clip=config.dual_clip)
    starpo.filter_groups(nothing, config.filter_value, config.filter)


def check_takes_part(config):
    """Refuse an option that would change nothing. Raises ValueError with what it needs."""
    a, turnwise = config.advantages, config.context != "full"
    critic = a in WITH_CRITIC
    needs = {
        "norm_by_std": (a == "grpo", "advantages grpo"),
        "gamma": (a in REINFORCE or a in ("gae", "bi_level_gae"),
                  "advantages gae, bi_level_gae or a REINFORCE"),
        "lam": (critic, "an estimator with a critic"),
        "gamma_turn": (a in ("bi_level_gae", "turn_gae") or turnwise and config.credit == "turn",
                       "advantages bi_level_gae or turn_gae, or credit turn and rows of one turn"),
        "critic_lr": (critic, "an estimator with a critic"),
        "value_clip": (critic, "an estimator with a critic"),
        "advantage_mask": (critic, "an estimator with a critic"),
        "loss_mask": (critic, "an estimator with a critic: others have no advantages elsewhere"),
        "reward_norm_over": (config.reward_norm != "identity", "a reward_norm"),
        "window": (turnwise, "context limited or single_turn"),
        "kl_target": (config.kl_reward_coef > 0, "a kl_reward_coef to start from"),
        "kl_horizon": (config.kl_target > 0, "a kl_target"),
        "kl_estimator": (config.kl_coef > 0, "a kl_coef"),
        "diagnose_samples": (config.diagnose_every > 0, "a diagnose_every"),
    }
    for name in ("filter_value", "filter_select", "filter_metric", "filter_include_zero"):
        needs[name] = config.filter != "none", "a filter"
    base = preset(config.env, config.algo, config.model, config.response_format)
    for name, (takes_part, needed) in needs.items():
        value = getattr(config, name)
        if not takes_part and value not in (getattr(base, name), getattr(Config, name)):
            raise ValueError(f"{name}: got {value}, but it takes no part here. It needs {needed}.")


def check_field(f, value):
    """Refuse a value outside the choices or the bounds of its field."""
    choices, least, most = (f.metadata[key] for key in ("choices", "least", "most"))
    if choices and value not in choices:
        raise ValueError(nearest(f.name, str(value), list(choices)))
    if f.type in (int, float) and not math.isfinite(value):
        raise ValueError(f"{f.name}: got {value}, expected a finite number.")
    if f.type in (int, float) and value < least:
        raise ValueError(f"{f.name}: got {value}, expected at least {least}.")
    if f.type in (int, float) and value > most:
        raise ValueError(f"{f.name}: got {value}, expected at most {most}.")


def env_options(config):
    """`--env-arg size=8 --env-arg frozenlake.slip=0.2` -> {"size": 8, "frozenlake.slip": 0.2}."""
    options = {}
    for text in config.env_arg:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"bad env_arg {text!r}: expected name=value.")
        try:
            options[name] = ast.literal_eval(
                value.capitalize() if value in ("true", "false") else value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            options[name] = value  # a text
    return options


def budgets(config):
    names = ("max_turns", "max_actions_per_turn", "max_actions")
    return {n: getattr(config, n) for n in names if getattr(config, n)}


def build_groups(config, split, num_groups, group_size):
    """The run's environments as groups: in the mixture's shares for training, evenly for everything
    else."""
    as_given = split == "train" and num_groups == config.num_groups
    spec = config.env if as_given else ",".join(env_names(config))
    return EnvGroups(spec, num_groups, group_size, split, env_options(config), budgets(config))


def backends(config):
    """For the first line: what outside of this process the environments lean on."""
    groups = build_groups(config, "train", len(env_names(config)), 1)
    return "".join(f"; {name} relies on {env.backend}"
                   for name, env in zip(groups.names, groups.envs) if env.backend)


def env_names(config):
    """The environments of the mixture, each once."""
    return list(dict.fromkeys(name for name, _ in parse_mixture(config.env, config.num_groups)))


def warmup_steps(config):
    return default_steps(config.model) if config.warmup_steps < 0 else config.warmup_steps


# ==================================================================================================
# The folder of a run


def run_folder(config, resume):
    """Where the run lives. Without a name it gets one that is free; a name that is taken is
    refused."""
    if config.run:
        folder = RUNS / config.run
        if folder.exists() and not resume:
            raise ValueError(f"run {config.run!r} exists already. Go on with --run {config.run} "
                             f"--resume, choose another name, or delete {folder}.")
        return folder
    stem = "-".join([config.env.replace(",", "+"), config.algo, Path(config.model).name,
                     f"s{config.seed}"])
    stem = re.sub(r"[^\w.+=-]+", ".", stem)
    names = (stem if i == 1 else f"{stem}-{i}" for i in range(1, 10**6))
    return next(RUNS / n for n in names if not (RUNS / n).exists())


def make_folder(folder):
    """Claim the name; another process may have been faster since `run_folder` looked."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ValueError(f"another process has just begun {folder}. Choose another "
                         f"--run.") from None


def resumed_config(given):
    """The run's own config. Only `steps` and `max_context` may be raised: the rest is the run."""
    if not given.get("run"):
        raise ValueError("--resume needs --run NAME.")
    stored = load_config(given["run"])
    for name, value in given.items():
        free = ("run", "steps", "max_context", "device", "threads")
        if name not in free and value != getattr(stored, name):
            raise ValueError(f"--resume goes on with the run's own settings: {name} was "
                             f"{getattr(stored, name)!r}, got {value!r}. Start a new run for "
                             f"that.")
    config = dataclasses.replace(stored, **given)
    if config.max_context < stored.max_context:
        raise ValueError(f"--resume cannot shrink max_context: it was {stored.max_context}, "
                         f"got {config.max_context}.")
    if config.steps < stored.steps:
        raise ValueError(f"--resume cannot take steps back: the run was set to {stored.steps}, got "
                         f"{config.steps}.")
    check(config)
    return config


def load_config(run):
    """The Config of runs/RUN under the name it has now. Raises ValueError if there is none or it is
    unreadable."""
    folder = RUNS / run
    if not (folder / "config.json").exists():
        raise ValueError(nearest("run", run,
                                 sorted(p.parent.name for p in RUNS.glob("*/config.json"))))
    return dataclasses.replace(read_config(folder), run=run)


def read_config(folder):
    """The Config in folder/config.json. Raises ValueError if it is not one."""
    try:
        stored = json.loads((folder / "config.json").read_text())
        config = Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()})
        for f in dataclasses.fields(config):
            value = getattr(config, f.name)
            if not isinstance(value, (int, float) if f.type is float else f.type):
                raise TypeError(f"{f.name} is {value!r}")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder}/config.json cannot be read: {error}.") from None
    return config
