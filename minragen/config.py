"""The options, their checks, and the command line.

    python -m minragen.train --algo starpo-s --print-config
    python -m minragen.train --help

Reading order: `Config`, `preset`, `from_options`, `check`. What an algorithm or an environment
changes is in data/presets.toml, which options exclude each other in support/checks.py.
"""

import argparse
import dataclasses
import importlib
import math
import re
from dataclasses import dataclass, field

from minragen.envs import REGISTRY, Budget
from minragen.support import options as typed
from minragen.support.checks import check_together
from minragen.support.formats import FORMATS, description_parts

TRAIN_SEED_STRIDE = 2**24  # training instances that a run's seed has
DATA = ("data", "corpus", "url", "products")  # environment options that bring data of the user
RUN_NAME = re.compile(r"[\w+=-][\w.+=-]{0,99}")  # cannot leave runs/
BUDGETS = tuple(f.name for f in dataclasses.fields(Budget))


def _presets():
    """The tables of presets.toml; one that is `like` another begins with its values."""
    tables = typed.data_table("presets")
    for options in [o for table in tables.values() for o in table.values() if "like" in o]:
        kind, name = options.pop("like").split(".")
        options.update(tables[kind][name] | options)
    return tables


_TABLES = _presets()
ALGOS, MODELS, ROOM, RECIPES = (_TABLES[kind] for kind in ("algo", "model", "room", "smollm2"))
PRETRAINED, EXTRA_PER_PART = MODELS["pretrained"], _TABLES["format"]["part"]
PRESETS = {model: _TABLES[model] for model in ("tiny", "tiny-vlm")}


def opt(default, text, choices=(), least=0, most=2**31):
    """A field with its help, bounds, and choices: names, or the name of a table of starpo.py."""
    return field(default=default, metadata=dict(help=text, choices=choices, least=least, most=most))


def choices_of(option):
    """The names that a field of Config may have; () for any."""
    names = option.metadata["choices"]
    if isinstance(names, str):  # imported when needed: PyTorch takes seconds
        names = tuple(getattr(importlib.import_module("minragen.starpo"), names))
    return names


@dataclass(frozen=True)
class Config:
    """Every field is an option: `max_new_tokens` is `--max-new-tokens`."""

    env: str = opt("frozenlake", "name, mixture (a,b or a=12,b=4), module:Class, or "
                                 "openenv:URL of a server")
    run: str = opt("", "folder under runs/; empty: named after env, algo, model and seed")
    seed: int = opt(0, "seed of everything random in the run", most=2**20 - 1)
    algo: str = opt("grpo", f"preset: {', '.join(ALGOS)}; or module:preset, your own dictionary")
    model: str = opt("", "tiny, tiny-vlm, smollm2, folder or Hugging Face id; empty: by device")
    device: str = opt("", "cpu, cuda or mps; empty: cuda if there is one")
    steps: int = opt(100, "training steps: a rollout and its updates", least=1)
    init_from: str = opt("", "run whose last checkpoint gives the initial weights")
    log: str = opt("", "where metrics also go: tensorboard, wandb or both (a,b)")
    warmup_steps: int = opt(400, "supervised steps on demonstrations before RL; 0: none")
    # -- environment
    env_arg: tuple = opt((), "environment option, name=value or env.name=value; may be repeated")
    layer: tuple = opt((), "wrapper of env, name,option=value or module:Class; may be repeated")
    max_turns: int = opt(0, "replies per episode; 0: the environment's own")
    max_actions_per_turn: int = opt(0, "actions executed from one reply; 0: the environment's own")
    max_actions: int = opt(0, "actions per episode; 0: the environment's own")
    response_format: str = opt("free_think", "parts of a reply", tuple(FORMATS))
    example: bool = opt(False, "show the model a reply, on another instance (TextEnv.example)")
    reward: str = opt("environment", "what training pays; success: only 1 for success",
                      ("environment", "success"))
    description_reward: float = opt(0.0, "weight of the F1 of described states (VAGEN: 0.5)")
    # -- rollout
    num_groups: int = opt(16, "P: prompts (instances) per step", least=1, most=2**16)
    group_size: int = opt(16, "G: trajectories per prompt", least=1, most=2**16)
    temperature: float = opt(1.0, "sampling temperature in training", least=1e-4)
    top_k: int = opt(0, "sample among the k most probable tokens; 0: all")
    top_p: float = opt(1.0, "sample among the tokens that hold this mass", least=1e-6, most=1)
    max_new_tokens: int = opt(24, "tokens per reply, told in the prompt", least=1, most=2**16)
    max_context: int = opt(512, "tokens per conversation", least=2, most=2**24)
    max_rows: int = opt(256, "conversations that are generated at a time", least=1)
    feed_share: float = opt(1.0, "go on once this share of envs has answered", least=0.01, most=1)
    context: str = opt("full", "history that a turn sees", ("full", "limited", "single_turn"))
    window: int = opt(3, "limited and single_turn: turns shown, this one included", least=1)
    # -- which groups
    filter: str = opt("top_p", "which groups are trained on", "FILTERS")
    filter_value: float = opt(0.9, "top_p: share of the summed reward stds; min_p: of the largest; "
                                   "top_k: share of the groups; top_k_abs: their number")
    resample: int = opt(0, "DAPO's dynamic sampling: extra rollouts per step, at most", most=100)
    # -- rewards
    credit: str = opt("episode", "whose last token gets the rewards", ("episode", "turn"))
    overlong: float = opt(0.0, "DAPO: penalise this last share of max_new_tokens", most=0.99)
    kl_reward_coef: float = opt(0.0, "weight of the KL to the model before RL in token rewards")
    # -- learning
    lr: float = opt(3e-4, "learning rate of the policy")
    lr_final: float = opt(1.0, "final learning rate / initial learning rate (linear decay)")
    critic_lr: float = opt(1e-3, "learning rate of the critic")
    advantages: str = opt("grpo", "estimator of the advantages", "ESTIMATORS")
    norm_by_std: bool = opt(True, "grpo, gigpo: divide by the group's standard deviation")
    gamma: float = opt(1.0, "discount per sampled token", most=1)
    lam: float = opt(1.0, "lambda of GAE per time step", most=1)
    gamma_turn: float = opt(1.0, "discount per turn, for estimators and credit by turn", most=1)
    ratio: str = opt("token", "importance ratio per token, per row (GSPO), or as a weight without "
                              "gradient (CISPO)", ("token", "sequence", "detached"))
    clip_low: float = opt(0.2, "lower clip of the ratio: 1 - low")
    clip_high: float = opt(0.28, "upper clip of the ratio: 1 + high")
    dual_clip: float = opt(3.0, "bound on the loss of tokens of negative advantage; >1, or 0: none")
    aggregation: str = opt("token-mean", "mean of the token losses", "AGGREGATIONS")
    entropy_coef: float = opt(0.001, "weight of the entropy bonus")
    kl_coef: float = opt(0.0, "weight of the KL to the model before RL in the loss")
    teacher: str = opt("", "a run or model that takes the place of the model before RL in the KL")
    echo_coef: float = opt(0.0, "ECHO: weight of the cross-entropy of observations in the loss")
    stale: int = opt(0, "step n plays with the weights of step n - stale", most=1000)
    tis_cap: float = opt(0.0, "truncated importance sampling: largest weight of a token; 0: none")
    kl_estimator: str = opt("k2", "estimator of the KL in the loss", ("k2", "k3"))
    epochs: int = opt(1, "passes over a batch", least=1)
    mini_batch: int = opt(64, "rows (trajectories, or windowed turns) per optimizer step", least=1)
    token_budget: int = opt(2400, "ids in one forward pass; speed and memory only", least=1)
    activation_checkpointing: bool = opt(False, "recompute activations in the backward pass")
    lora_rank: int = opt(0, "rank of LoRA adapters, which alone are trained; 0: all weights")
    attention: str = opt("", "of the learner's passes, such as flash_attention_2; empty: our own")
    compile: str = opt("auto", "torch.compile; auto: in long runs on CUDA", ("auto", "on", "off"))
    plain: bool = opt(False, "turn off everything that is only faster (table in run/start.py)")
    max_grad_norm: float = opt(1.0, "gradients are clipped to this global norm", least=1e-4)
    # -- measuring
    val_size: int = opt(256, "held-out instances per validation", least=1, most=2**16)
    val_temperature: float = opt(0.5, "of validation; 0: greedy")
    val_every: int = opt(20, "steps between validations; also before and after training", least=1)
    diagnose_every: int = opt(10, "mutual information: step 1 and every N steps; 0: never")
    gradients_every: int = opt(0, "gradients by reward std: step 1 and every N steps; 0: never")
    early_stop: bool = opt(False, "end when the reward std or validation collapses, as in RAGEN")
    save_every: int = opt(20, "steps between checkpoints; also after the last", least=1)


# ---- Presets -------------------------------------------------------------------------------------
def preset(env="frozenlake", algo="grpo", model="tiny", response_format=""):
    """The complete Config. An empty response_format means the preset's own."""
    options = {}
    for source in sources_of(env, algo, model, response_format).values():
        options |= source
    options.setdefault("response_format", response_format or Config.response_format)
    parts = len(description_parts(options["response_format"]))
    for name, tokens in EXTRA_PER_PART.items():
        options[name] = options.get(name, getattr(Config, name)) + parts * tokens
    return Config(env=env, algo=algo, model=model, **options)


def preset_of(config):
    """The preset that a Config started from."""
    return preset(config.env, config.algo, config.model, config.response_format)


def sources_of(env, algo, model, response_format):
    """What a preset is made of: {where from: options}; the later win."""
    own = f"env {env} and model {typed.short(model)}"
    of_algo = {f"algo {algo}": typed.algo_options(algo, ALGOS, vars(Config()))}
    if model in PRESETS:
        return {own: _of_envs(PRESETS[model], env)} | of_algo
    of_model = {f"model {typed.short(model)}": MODELS.get(model, PRETRAINED)}
    recipe = RECIPES.get(env) if model == "smollm2" else None
    fits = recipe and response_format in ("", recipe["response_format"])  # its limits suit that
    return of_algo | of_model | {own: _of_envs(ROOM, env) | (recipe if fits else {})}


def _of_envs(table, env):
    """An environment's entry. Of a mixture: the largest of each number, and every environment
    option as env.name=value; no texts and no budgets."""
    merged, names = {}, [part.partition("=")[0].strip() for part in env.split(",")]
    for name in names:
        owner = f"{name}." if len(names) > 1 else ""
        for key, value in table.get(name, {}).items():
            if key == "env_arg":
                merged[key] = (*merged.get(key, ()), *(owner + text for text in value))
            elif not owner or (key not in BUDGETS and not isinstance(value, str)):
                merged[key] = max(value, merged.get(key, value))
    return merged


# ---- The command line ----------------------------------------------------------------------------
def parse(argv):
    """{name: value} of the given options, with `resume` and `print_config`. Raises ValueError."""
    parser = argparse.ArgumentParser(
        prog="minragen.train", allow_abbrev=False, argument_default=argparse.SUPPRESS,
        description="Train a language-model agent. In brackets: defaults, which presets "
                    "change: see --print-config. `minragen train` also takes --nproc N or auto.")
    parser.error = _usage_error
    parser.add_argument("--resume", action="store_true", default=False,
                        help="continue from runs/NAME/checkpoint")
    parser.add_argument("--print-config", action="store_true", default=False,
                        help="print all settings and where they come from, and exit")
    for f in dataclasses.fields(Config):
        kind = (dict(action="append") if f.type is tuple else
                dict(type=_boolean if f.type is bool else f.type))
        choices = ", ".join(choices_of(f) if {"-h", "--help"} & {*argv} else ())
        parser.add_argument("--" + f.name.replace("_", "-"), **kind, help=(
            f.metadata["help"] + (choices and f": {choices}") + f" [{f.default}]"))
    given, unknown = parser.parse_known_args(argv)
    if given.resume and not vars(given).get("run"):
        raise ValueError("--resume needs --run NAME.")
    if unknown:
        names = [*vars(Config()), "resume", "print_config"]
        raise ValueError(typed.unknown_option(
            unknown[0].partition("=")[0], ["--" + name.replace("_", "-") for name in names]))
    return {k: tuple(v) if isinstance(v, list) else v for k, v in vars(given).items()}


def from_options(given):
    """The Config of the given options, checked: see `unchecked`."""
    return check(unchecked(given))


def unchecked(given):
    """The preset with the given options {name: value}; `model` must be among them.

    Given environment options are added to the preset's and replace options of the same name. Those
    that bring DATA replace all of the preset's, which fit only the bundled data.
    """
    base = preset(**{name: value for name, value in given.items()
                     if name in ("env", "algo", "model", "response_format")})
    options = given.get("env_arg", ())
    single = "" if "," in base.env else base.env.partition("=")[0].strip() + "."
    names = {text.partition("=")[0].removeprefix(single) for text in options}
    kept = []
    for text in base.env_arg:
        env, dot, option = text.partition("=")[0].rpartition(".")  # a mixture's has env and dot
        if not any({name, env + dot + name} & names for name in (option, *DATA)):
            kept.append(text)
    return dataclasses.replace(base, **given | {"env_arg": (*kept, *options)})


def summary(config):
    """One line: what differs from the preset."""
    base = preset_of(config)
    changed = ", ".join(f"{name}={typed.short(value)}" for name, value in vars(config).items()
                        if value != getattr(base, name) and name not in ("run", "seed", "device"))
    kind = config.env, config.algo, typed.short(config.model), config.response_format
    return f"the preset of {', '.join((*kind, changed and 'with ' + changed or 'unchanged'))}"


def _usage_error(message):
    raise ValueError(message[0].lower() + message[1:] + ". See --help.")


def _boolean(text):
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected true or false")
    return text.lower() == "true"


# ---- What cannot work ----------------------------------------------------------------------------
def check(config):
    """Return the Config. Raise ValueError, with one sentence, for what cannot work."""
    base = preset_of(config)  # imports a user's algorithm, which may add choices
    for f in dataclasses.fields(config):
        value, choices = getattr(config, f.name), choices_of(f)
        least, most = f.metadata["least"], f.metadata["most"]
        if choices and value not in choices:
            raise ValueError(typed.nearest(f.name, str(value), list(choices)))
        if f.type in (int, float) and not least <= value <= most:
            bound = ("a finite number" if not math.isfinite(value) else
                     f"at least {least}" if value < least else f"at most {most}")
            raise ValueError(f"{f.name}: got {value}, expected {bound}.")
    instances = config.steps * config.num_groups * (1 + config.resample)
    if instances > TRAIN_SEED_STRIDE:
        raise ValueError(f"steps * num_groups * (1 + resample): got {instances}, expected at most "
                         f"{TRAIN_SEED_STRIDE}: a seed has no more instances.")
    for name in filter(None, (config.run, config.init_from)):
        if not RUN_NAME.fullmatch(name):
            raise ValueError(f"bad run name {name!r}: expected up to 100 letters, digits and -_.+=")
    check_together(config, base)
    typed.parse_mixture(",".join(env_names(config)), config.val_size, REGISTRY)  # val_size in parts
    return config


# ---- The environments of a Config ----------------------------------------------------------------
def env_names(config):
    """The distinct environments of the mixture."""
    mixture = typed.parse_mixture(config.env, config.num_groups, REGISTRY)
    return list(dict.fromkeys(name for name, _ in mixture))
