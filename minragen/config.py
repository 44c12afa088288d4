"""The options, their presets, and the command line.

    python -m minragen.train --algo starpo-s --print-config
    python -m minragen.train --help

Reading order: `Config`, `ALGOS`, `TINY`, `check`. docs/algorithms.md has equations and papers.
"""

import argparse
import dataclasses
import importlib.util
import math
import re
from dataclasses import dataclass, field

import torch

from minragen import starpo
from minragen.chat import CONTEXTS, FORMATS, description_parts
from minragen.envs import Budget, nearest, parse_mixture
from minragen.more import loggers

TRAIN_SEED_STRIDE = 2**24  # instances of a run seed
DATA = ("data", "corpus", "url", "products")  # environment options that bring data of the user
RUN_NAME = re.compile(r"[\w+=-][\w.+=-]{0,99}")  # cannot leave runs/
BUDGETS = tuple(f.name for f in dataclasses.fields(Budget))
# What is measured in each episode, and which statistic of a group is its score.
FILTER_METRICS = {"reward_std": ("returns", "std"), "reward": ("returns", "mean"),
                  "length": ("lengths", "mean"), "entropy": ("entropy", "mean"),
                  "entropy_std": ("entropy", "std")}
# What an algorithm changes in the base Config. Those with a critic have their own learning rate.
GAE = dict(advantages="gae", credit="turn", lam=0.95, lr=3e-4)
ALGOS = {
    "grpo": dict(),
    "ppo": GAE,
    "dr-grpo": dict(norm_by_std=False, aggregation="seq-mean-token-sum-norm"),
    "dapo": dict(filter_value=1.0, resample=3, overlong=0.2, dual_clip=0.0, entropy_coef=0.0,
                 kl_coef=0.0, aggregation="token-mean"),
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


def opt(default, text, choices=None, least=0, most=2**31):
    """A field with its help, and its choices or the bounds of its number."""
    return field(default=default, metadata=dict(help=text, choices=choices, least=least, most=most))


@dataclass(frozen=True)
class Config:
    """Every field is an option: `max_new_tokens` is `--max-new-tokens`."""

    env: str = opt("frozenlake", "name, mixture (a,b or a=12,b=4), module:Class, Gymnasium id, "
                                 "reasoning_gym:DATASET or openenv:URL of a server")
    run: str = opt("", "folder under runs/; empty: named after env, algo, model and seed")
    seed: int = opt(0, "seed of everything random in the run", most=2**20 - 1)
    algo: str = opt("grpo", "preset of the algorithm", tuple(ALGOS))
    model: str = opt("", "tiny, tiny-vlm, smollm2, a folder or a Hugging Face id; empty: by "
                         "the device")
    device: str = opt("", "cpu, cuda or mps; empty: cuda if there is one")
    threads: int = opt(0, "CPU threads of PyTorch; 0: one for tiny on a CPU, else all", most=1024)
    steps: int = opt(100, "training steps: a rollout and its updates", least=1)
    init_from: str = opt("", "a run whose last checkpoint's weights this one begins with")
    log: str = opt("", "where metrics also go: tensorboard, wandb or both (a,b)")
    warmup_steps: int = opt(400, "supervised steps on noisy demonstrations before RL; 0: none")
    # -- environment
    env_arg: tuple = opt((), "environment option, name=value or env.name=value; may be repeated")
    max_turns: int = opt(0, "replies per episode; 0: the environment's own")
    max_actions_per_turn: int = opt(0, "actions executed from one reply; 0: the environment's own")
    max_actions: int = opt(0, "actions per episode; 0: the environment's own")
    response_format: str = opt("free_think", "parts of a reply", tuple(FORMATS))
    grounding_reward: float = opt(0.0, "weight of observation F1 in training (VAGEN: 0.5)")
    worldmodeling_reward: float = opt(0.0, "weight of prediction F1 in training (VAGEN: 0.5)")
    # -- rollout
    num_groups: int = opt(16, "P: prompts (instances) per step", least=1, most=2**16)
    group_size: int = opt(16, "G: trajectories per prompt", least=1, most=2**16)
    temperature: float = opt(1.0, "sampling temperature in training", least=1e-4)
    top_k: int = opt(0, "sample among the k most probable tokens; 0: all")
    top_p: float = opt(1.0, "sample among the tokens that hold this mass", least=1e-6, most=1)
    max_new_tokens: int = opt(24, "tokens per reply; the prompt and so the warm-up depend on it",
                              least=1, most=2**16)
    max_context: int = opt(512, "tokens per conversation", least=2, most=2**24)
    max_rows: int = opt(256, "conversations that are generated in one batch", least=1)
    context: str = opt("full", "history that a turn sees (docs/formats.md)", CONTEXTS)
    window: int = opt(3, "limited and single_turn: turns shown, this one included", least=1)
    # -- which groups
    filter: str = opt("top_p", "which groups are trained on", starpo.FILTERS)
    filter_value: float = opt(0.9, "top_p: share of the summed scores; top_k: share of the groups; "
                                   "top_k_abs: number of groups; min_p: share of the best score")
    filter_select: str = opt("largest", "end of the scores that is kept", ("largest", "smallest"))
    filter_metric: str = opt("reward_std", "score of a group of episodes", tuple(FILTER_METRICS))
    filter_include_zero: bool = opt(False, "whether groups of score 0 are candidates")
    resample: int = opt(0, "DAPO's dynamic sampling: extra rollouts per step, at most", most=100)
    # -- rewards
    credit: str = opt("episode", "where rewards go: to the end of the episode or of each turn",
                      ("episode", "turn"))
    reward_norm: str = opt("identity", "normalisation of the returns", starpo.REWARD_NORMS)
    reward_norm_over: str = opt("group", "whose mean and std reward_norm takes", ("group", "batch"))
    overlong: float = opt(0.0, "DAPO: penalise this last share of max_new_tokens", most=0.99)
    kl_reward_coef: float = opt(0.0, "weight of the KL to the model before RL in token rewards")
    kl_target: float = opt(0.0, "nats per token that kl_reward_coef adapts to; 0: constant")
    kl_horizon: float = opt(1e4, "trajectories per change of kl_reward_coef by up to 1/5", least=1)
    # -- learning
    lr: float = opt(3e-4, "learning rate of the policy")
    lr_final: float = opt(1.0, "final learning rate / initial learning rate (linear decay)")
    decay_steps: int = opt(0, "steps over which the learning rate decays; 0: all")
    critic_lr: float = opt(1e-3, "learning rate of the critic")
    advantages: str = opt("grpo", "estimator of the advantages", tuple(starpo.ESTIMATORS))
    norm_by_std: bool = opt(True, "grpo: divide by the group's standard deviation")
    gamma: float = opt(1.0, "discount per sampled token", most=1)
    lam: float = opt(1.0, "lambda of GAE per time step", most=1)
    gamma_turn: float = opt(1.0, "discount per turn, for estimators and credit by turn", most=1)
    advantage_mask: str = opt("response", "GAE's time steps (all: ablation)", ("response", "all"))
    soft_reweight: bool = opt(False, "advantages times the group's reward std over the largest one")
    length_weight: bool = opt(False, "advantages times mean length / length of the episode")
    loss_scaling: str = opt("none", "policy loss times share of groups kept", starpo.LOSS_SCALINGS)
    zero_task: bool = opt(False, "advantages 0: only the regularisers train (an ablation)")
    ratio: str = opt("token", "importance ratio per token, or per row: GSPO", ("token", "sequence"))
    clip_low: float = opt(0.2, "lower clip of the ratio: 1 - low")
    clip_high: float = opt(0.28, "upper clip of the ratio: 1 + high")
    dual_clip: float = opt(3.0, "bound on the loss of tokens of negative advantage; >1, or 0: none")
    aggregation: str = opt("token-mean", "mean of the token losses", starpo.AGGREGATIONS)
    loss_mask: str = opt("response", "tokens in the loss (all: ablation)", ("response", "all"))
    value_clip: float = opt(0.5, "how far one update may move a value")
    entropy_coef: float = opt(0.001, "weight of the entropy bonus")
    kl_coef: float = opt(0.0, "weight of the KL to the model before RL in the loss")
    kl_estimator: str = opt("k3", "estimator of the KL in the loss", starpo.KL_ESTIMATORS[1:])
    epochs: int = opt(1, "passes over a batch", least=1)
    mini_batch: int = opt(64, "rows (trajectories, or windowed turns) per optimizer step", least=1)
    token_budget: int = opt(2400, "ids in one forward pass; speed and memory only", least=1)
    activation_checkpointing: bool = opt(False, "recompute activations in the backward pass")
    freeze_vision: bool = opt(False, "do not train the vision tower")
    lora_rank: int = opt(0, "rank of LoRA adapters, which alone are trained; 0: all weights")
    attention: str = opt("", "transformers' attention of the learner's passes, such as "
                             "flash_attention_2; empty: ours, which shares prompts")
    max_grad_norm: float = opt(1.0, "gradients are clipped to this global norm", least=1e-4)
    # -- measuring
    val_size: int = opt(256, "held-out instances per validation", least=1, most=2**16)
    val_temperature: float = opt(0.5, "of sampled validation; greedy is always measured too")
    val_every: int = opt(20, "steps between validations; also before and after training", least=1)
    diagnose_every: int = opt(10, "mutual information at step 1 and every so many; 0: never")
    diagnose_samples: int = opt(64, "reasonings in such a measurement; 0: all", most=2**16)
    gradients_every: int = opt(0, "gradients by reward std at step 1 and every so many; 0: never")
    early_stop: bool = opt(False, "end when the reward std or validation collapses, as in RAGEN")
    save_every: int = opt(20, "steps between checkpoints; also after the last", least=1)


# A preset makes `--env NAME` enough. tiny's also set environment options that make the task
# learnable for a model of its size, and a KL where its reasoning would degrade without (LOG.md).
TINY = {"bandit": dict(env_arg=("mixed=True",), steps=30, lr=3e-4, max_new_tokens=24,
                       max_context=256)}
TINY |= {name: dict(lr=5e-4, lr_final=0.1) | sizes for name, sizes in {
    "frozenlake": dict(env_arg=("view=coord", "frozen=0.8"), steps=200, warmup_steps=1600,
                       kl_coef=0.1, max_new_tokens=32, max_context=512, val_every=40),
    "sokoban": dict(env_arg=("view=coord", "pulls=2"), steps=120, warmup_steps=800, kl_coef=0.1,
                    max_new_tokens=24, max_context=640),
    "sudoku": dict(env_arg=("hints=True",), steps=60, warmup_steps=800, num_groups=8,
                   kl_coef=0.1, max_new_tokens=24, max_context=768, val_every=30),
    "countdown": dict(env_arg=("count=3", "largest=10", "operators=+*"), steps=120,
                      warmup_steps=1600, lr=3e-4, kl_coef=0.1, max_new_tokens=64,
                      max_context=224),
    # Failed episodes are the longest; a token mean would over-weight them.
    "webshop": dict(env_arg=("wording=plain", "page_size=3"), steps=60, warmup_steps=1200,
                    group_size=8, aggregation="seq-mean-token-mean", max_new_tokens=40,
                    max_context=1280),
    "searchqa": dict(env_arg=("hops=2", "results=1"), steps=60, warmup_steps=1000, max_turns=3,
                     max_new_tokens=32, max_context=512),
    "lean": dict(env_arg=("family=logic",), steps=60, warmup_steps=800, num_groups=8,
                 max_new_tokens=24, max_context=1024, val_every=20),
    "deepcoder": dict(env_arg=("family=formulas",), steps=40, warmup_steps=500, max_new_tokens=32,
                      max_context=256),
    "metamathqa": dict(env_arg=("max_steps=1", "largest=12", "distractors=False"), max_turns=1,
                       steps=150, warmup_steps=600, num_groups=32, group_size=8, max_new_tokens=24,
                       max_context=192, val_every=25)}.items()}
TINY_VLM = {"frozenlake": TINY["frozenlake"] | dict(env_arg=("view=image", "frozen=0.8")),
            "sokoban": TINY["sokoban"] | dict(env_arg=("view=image", "pulls=2"))}
PRESETS = {"tiny": TINY, "tiny-vlm": TINY_VLM}
# What changes for a pretrained model: RAGEN V2's rates, steps and batches, longer replies.
PRETRAINED = dict(steps=200, warmup_steps=0, lr=1e-6, critic_lr=1e-5, num_groups=8, mini_batch=32,
                  max_new_tokens=128, max_context=2048, token_budget=8192)
ROOM = {"webshop": dict(max_context=8192), "deepcoder": dict(max_new_tokens=512),
          "metamathqa": dict(max_new_tokens=256), "lean": dict(max_context=4096),
          "searchqa": dict(max_context=4096)}
# SmolLM2 rarely closes a tag by itself.
MODELS = {"tiny": {}, "tiny-vlm": {}, "smollm2": PRETRAINED | dict(warmup_steps=20)}
# Tokens that each describing part of a format adds, per reply and per conversation.
DESCRIPTION = dict(max_new_tokens=48, max_context=768)


def preset(env="frozenlake", algo="grpo", model="tiny", response_format="free_think"):
    """The complete Config of an environment, an algorithm, a model and a response format."""
    if algo not in ALGOS:
        raise ValueError(nearest("algo", algo, list(ALGOS)))
    layers = (_of_envs(PRESETS[model], env) | ALGOS[algo] if model in PRESETS else
              ALGOS[algo] | MODELS.get(model, PRETRAINED) | _of_envs(ROOM, env))
    parts = len(description_parts(response_format))
    for name, tokens in DESCRIPTION.items():
        layers[name] = layers.get(name, getattr(Config, name)) + parts * tokens
    return Config(env=env, algo=algo, model=model, response_format=response_format, **layers)


def _of_envs(table, env):
    """The entry of an environment; of a mixture the largest of the numbers that its entries set,
    all environment options under their environment's name, and no texts and budgets."""
    merged, names = {}, [part.partition("=")[0].strip() for part in env.split(",")]
    for name in names:
        for key, value in table.get(name, {}).items():
            if len(names) == 1:
                merged[key] = value
            elif key == "env_arg":
                merged[key] = (*merged.get(key, ()), *(f"{name}.{text}" for text in value))
            elif key not in BUDGETS and not isinstance(value, str):
                merged[key] = max(value, merged.get(key, value))
    return merged


def preset_of(config):
    """The preset that a Config started from."""
    return preset(config.env, config.algo, config.model, config.response_format)


# ---- The command line ----------------------------------------------------------------------------
# Options -> names of TRL, transformers, verl, OpenRLHF, RAGEN.
CALLED_ELSEWHERE = {
    "lr": "learning_rate actor_learning_rate", "critic_lr": "critic_learning_rate",
    "num_groups group_size": "batch_size train_batch_size per_device_train_batch_size",
    "num_groups": "env_groups", "group_size": "num_generations n rollout_n n_samples_per_prompt",
    "mini_batch": "ppo_mini_batch_size", "token_budget": "ppo_max_token_len_per_gpu",
    "kl_coef": "beta kl_beta kl_loss_coef", "kl_reward_coef": "init_kl_coef",
    "steps": "max_steps num_train_epochs total_training_steps total_epochs",
    "epochs": "num_iterations ppo_epochs num_ppo_epochs", "entropy_coef": "entropy_coeff ent_coef",
    "max_new_tokens": "max_completion_length max_response_length response_length max_tokens",
    "max_context": "max_prompt_length max_model_len max_length", "max_turns": "max_turn",
    "clip_low clip_high": "epsilon clip_ratio eps_clip cliprange", "clip_low": "clip_ratio_low",
    "clip_high": "clip_ratio_high epsilon_high", "dual_clip": "clip_ratio_c", "lam": "gae_lambda",
    "lr_final decay_steps": "lr_scheduler_type", "lora_rank": "lora_r", "algo": "algorithm",
    "env": "env_name env_id task",
    "advantages": "adv_estimator advantage_estimator", "model": "model_name_or_path model_path",
    "run": "output_dir experiment_name run_name", "run resume": "resume_from_checkpoint",
    "log": "report_to logger", "save_every": "save_steps save_freq", "max_grad_norm": "grad_clip",
    "val_every": "eval_steps test_freq", "activation_checkpointing": "gradient_checkpointing"}
# What is said of names of theirs that are no option here.
NOT_HERE = {
    "gradients add up over a mini_batch by themselves, and token_budget bounds a forward pass":
        "gradient_accumulation_steps ppo_micro_batch_size ppo_micro_batch_size_per_gpu",
    "the learning rate has no warm-up, and warmup_steps are supervised steps before RL":
        "warmup_ratio lr_warmup_steps lr_warmup_ratio lr_warmup_steps_ratio",
    "alpha is always twice lora_rank": "lora_alpha"}


def parse(argv):
    """{name: value} of the given options, with `resume` and `print_config`. Raises ValueError."""
    parser = argparse.ArgumentParser(
        prog="minragen.train", allow_abbrev=False, argument_default=argparse.SUPPRESS,
        description="Train a language-model agent. [base default]; presets change it: "
                    "see --print-config.")
    parser.error = _usage_error
    parser.add_argument("--resume", action="store_true", default=False,
                        help="continue from runs/NAME/checkpoint")
    parser.add_argument("--print-config", action="store_true", default=False,
                        help="print all settings and where they come from, and exit")
    for f in dataclasses.fields(Config):
        kind = (dict(action="append") if f.type is tuple else
                dict(type=_boolean if f.type is bool else f.type))
        choices = ", ".join(f.metadata["choices"] or ())
        parser.add_argument("--" + f.name.replace("_", "-"), **kind, help=(
            f.metadata["help"] + (choices and f": {choices}") + f" [{f.default}]"))
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ValueError(_unknown_option(unknown[0].partition("=")[0]))
    return {k: tuple(v) if isinstance(v, list) else v for k, v in vars(given).items()}


def from_options(given):
    """The checked Config of the given options {name: value}; `model` must be among them.

    Given environment options are added to the preset's and replace those of the same name. An
    environment that gets data of the user keeps none of the preset's: they shape the bundled data.
    """
    base = preset_of(Config(**given))
    options = given.get("env_arg", ())
    single = "" if "," in base.env else base.env.partition("=")[0].strip() + "."
    names = {text.partition("=")[0].removeprefix(single) for text in options}
    kept = []
    for text in base.env_arg:
        env, dot, option = text.partition("=")[0].rpartition(".")
        replaced = {name for o in (option, *DATA) for name in (o, env + dot + o)}
        kept += [text] if not names & replaced else []
    config = dataclasses.replace(base, **given | {"env_arg": (*kept, *options)})
    check(config)
    return config


def summary(config):
    """One line: what differs from the preset."""
    base = preset_of(config)
    changed = [f"{name}={value}" for name, value in vars(config).items()
               if value != getattr(base, name) and name not in ("run", "seed", "device")]
    start = f"the preset of {config.env}, {config.algo}, {config.model}, {config.response_format}"
    return f"{start}, {'with ' + ', '.join(changed) if changed else 'unchanged'}"


def explain(config, given):
    """All settings as text: what differs from the base and where from, then the rest."""
    title = f"{config.env} with {config.algo} and model {config.model}: what differs from the base"
    lines, rest = [title], ["", "the rest is the base"]
    for f in dataclasses.fields(config):
        if f.name in ("env", "algo", "model"):
            continue
        value = getattr(config, f.name)
        line = f"{f.name.replace('_', '-'):22} {value!r:14}"
        sized = f.name in _of_envs(ROOM, config.env) and config.model not in PRESETS
        sources = {"you": f.name in given,
                   f"env {config.env} and format {config.response_format}":
                       f.name in DESCRIPTION and description_parts(config.response_format),
                   f"model {config.model}": f.name in MODELS.get(config.model, PRETRAINED)
                       and not sized,
                   f"algo {config.algo}": f.name in ALGOS[config.algo],
                   f"env {config.env} and model {config.model}": True}
        through = next(source for source, applies in sources.items() if applies)
        if value == f.default:
            rest.append(line.rstrip())
        else:
            lines.append(f"{line} base {f.default!r:14} through {through}")
    return "\n".join(lines + rest)


def _unknown_option(name):
    """The sentence for an unknown option: what it is here, or the nearest ones."""
    helps = {f.name: f.metadata["help"] for f in dataclasses.fields(Config)}
    helps["resume"] = "continue from its checkpoint"
    bare = name.lstrip("-").rpartition(".")[2].replace("-", "_")  # verl: actor.optim.lr=1e-6
    for said, theirs in NOT_HERE.items():
        if bare in theirs.split():
            return f"unknown option {name!r}: {said}."
    for ours, theirs in CALLED_ELSEWHERE.items():
        if bare in (ours, *theirs.split()):
            options = [f"--{part.replace('_', '-')} ({helps[part]})" for part in ours.split()]
            return f"unknown option {name!r}: here it is {' and '.join(options)}."
    known = ["--" + part.replace("_", "-") for part in (*helps, "print_config")]
    return nearest("option", name, known) + " See --help."


def _usage_error(message):
    raise ValueError(message[0].lower() + message[1:] + ". See --help.")


def _boolean(text):
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected true or false")
    return text.lower() == "true"


# ---- What cannot work ----------------------------------------------------------------------------
def check(config):
    """Refuse what cannot work, before anything is built. Raises ValueError with one sentence."""
    for f in dataclasses.fields(config):
        value, choices = getattr(config, f.name), f.metadata["choices"]
        least, most = f.metadata["least"], f.metadata["most"]
        if choices and value not in choices:
            raise ValueError(nearest(f.name, str(value), list(choices)))
        if f.type in (int, float) and not least <= value <= most:
            bound = ("a finite number" if not math.isfinite(value) else
                     f"at least {least}" if value < least else f"at most {most}")
            raise ValueError(f"{f.name}: got {value}, expected {bound}.")
    instances = config.steps * config.num_groups * (1 + config.resample)
    if instances > TRAIN_SEED_STRIDE:
        raise ValueError(f"steps * num_groups * (1 + resample): got {instances}, expected at most "
                         f"{TRAIN_SEED_STRIDE}, the instances of a seed.")
    for name in filter(None, (config.run, config.init_from)):
        if not RUN_NAME.fullmatch(name):
            raise ValueError(f"bad run name {name!r}: expected up to 100 letters, digits and "
                             f"-_.+= only.")
    for name in loggers.names(config.log):
        if name not in loggers.LOGGERS:
            raise ValueError(nearest("log", name, list(loggers.LOGGERS)))
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # the latter is a folder of that name
            raise ImportError(f"--log {name} needs a package: pip install {name}")
    check_used(config)
    for refused, sentence in CONTRADICTIONS:
        if refused(config):
            raise ValueError(sentence.format_map(vars(config)))
    nothing = torch.zeros(1)  # these functions themselves refuse bad values
    starpo.policy_loss(nothing, nothing, nothing, dual_clip=config.dual_clip)
    starpo.filter_groups(nothing, config.filter_value, config.filter)
    parse_mixture(config.env, config.num_groups)
    parse_mixture(",".join(env_names(config)), config.val_size)


def estimator_kind(config):
    """What the advantage estimator needs: "group", "reward" or "critic"."""
    return starpo.ESTIMATORS[config.advantages][0]


# (whether a Config contradicts itself, the message)
CONTRADICTIONS = (
    (lambda c: estimator_kind(c) == "group" and c.group_size < 2,
     "{advantages} compares the members of a group: got group_size 1, expected at least 2."),
    (lambda c: c.group_size < 2 and (c.soft_reweight or c.filter != "none"
                                     and c.filter_metric.endswith("std")),
     "group_size 1 has no reward std: expected at least 2, or filter none without soft_reweight."),
    (lambda c: estimator_kind(c) == "group" and c.credit == "turn",
     "{advantages} compares whole episodes: got credit turn, expected episode, or an estimator of "
     "token rewards (gae, reinforce, ...)."),
    (lambda c: c.reward_norm != "identity" and c.credit == "turn",
     "reward_norm {reward_norm} normalises episode returns: got credit turn, expected episode."),
    (lambda c: c.advantages in ("bi_level_gae", "turn_gae") and c.context != "full",
     "{advantages} needs all turns in one row: got context {context}, expected full."),
    (lambda c: c.filter in ("top_p", "min_p") and c.filter_metric == "reward",
     "filter {filter} takes shares of scores, but rewards may be negative. Use top_p_softmax or "
     "top_k with filter_metric reward."),
    (lambda c: c.filter == "top_k_abs" and c.filter_value != int(c.filter_value),
     "filter top_k_abs: got filter_value {filter_value}, expected a whole number of groups."),
    (lambda c: c.resample and (c.filter, c.filter_value, c.filter_metric, c.filter_include_zero)
     != ("top_p", 1.0, "reward_std", False),
     "resample replaces groups of reward std 0: expected the filter that drops just those, filter "
     "top_p with filter_value 1 and filter_metric reward_std."),
    (lambda c: c.ratio == "sequence" and estimator_kind(c) != "group",
     "ratio sequence needs one advantage per row: got {advantages}, expected grpo, rloo or "
     "reinforce_pp_baseline."),
)
_CRITIC = (lambda c: estimator_kind(c) == "critic", "an estimator with a critic")
_FILTER = (lambda c: c.filter != "none", "a filter")
# option -> (whether it has an effect, what it needs for one)
NEEDS = {
    "decay_steps": (lambda c: c.lr_final != 1, "an lr_final that is not 1"),
    "soft_reweight": (lambda c: c.reward_norm != "mean_std" or c.reward_norm_over != "group",
                      "a reward_norm that leaves groups different reward stds"),
    "norm_by_std": (lambda c: c.advantages == "grpo", "advantages grpo"),
    "gamma": (lambda c: estimator_kind(c) == "reward" or c.advantages in ("gae", "bi_level_gae"),
              "advantages gae, bi_level_gae or a REINFORCE"),
    "gamma_turn": (lambda c: c.advantages in ("bi_level_gae", "turn_gae")
                   or c.context != "full" and c.credit == "turn",
                   "advantages bi_level_gae or turn_gae, or credit turn and rows of one turn"),
    "lam": _CRITIC, "critic_lr": _CRITIC, "value_clip": _CRITIC,
    "advantage_mask": (lambda c: c.advantages in ("gae", "bi_level_gae"),
                       "advantages gae or bi_level_gae"),
    "loss_mask": (_CRITIC[0], "an estimator with a critic: others train sampled tokens only"),
    "reward_norm_over": (lambda c: c.reward_norm != "identity", "a reward_norm"),
    "window": (lambda c: c.context != "full", "context limited or single_turn"),
    "kl_target": (lambda c: c.kl_reward_coef > 0, "a kl_reward_coef to start from"),
    "kl_horizon": (lambda c: c.kl_target > 0, "a kl_target"),
    "kl_estimator": (lambda c: c.kl_coef > 0, "a kl_coef"),
    "diagnose_samples": (lambda c: c.diagnose_every > 0, "a diagnose_every"),
    "filter_value": _FILTER, "filter_select": _FILTER, "filter_metric": _FILTER,
    "filter_include_zero": _FILTER, "loss_scaling": _FILTER,
}


def check_used(config):
    """Refuse an option that would change nothing."""
    base = preset_of(config)
    for name, (has_effect, needed) in NEEDS.items():
        value = getattr(config, name)
        if value not in (getattr(base, name), getattr(Config, name)) and not has_effect(config):
            raise ValueError(f"{name}: got {value}, but it has no effect here. It needs {needed}.")


# ---- The environments of a Config ----------------------------------------------------------------
def env_names(config):
    """The distinct environments of the mixture."""
    return list(dict.fromkeys(name for name, _ in parse_mixture(config.env, config.num_groups)))


def changed_environment(config):
    """The environment options and budgets that a Config sets, as texts."""
    budgets = [f"{n}={getattr(config, n)}" for n in BUDGETS if getattr(config, n)]
    return [*config.env_arg, *budgets]
