"""What a text environment is: the contract, the budget, the registry, and groups of environments.

Reading order: `Budget` and `TextEnv` (the contract), `make` (the registry), `EnvGroups` (RAGEN's
environment state manager). The ten environments are in minragen/environments, one file each.

Axes: P groups, G members of a group (same instance, own dynamics), K turns.

Differences from RAGEN V2's environments and its `es_manager`:
  1. The instance comes from `seed` alone and the dynamics from `(seed, member)`. In RAGEN all
     members share the dynamics, and Bandit's members do not even share their prompt.
  2. `train`, `val` and `test` are disjoint by *instance*: a CRC of the instance's text names its
     split, and generation draws again until it fits. RAGEN separates seeds, so the splits of a
     small environment share instances.
  3. All limits of turns and actions in a prompt come from the one `Budget`. RAGEN announces budgets
     that its own caps make unreachable.
  4. The format penalty is part of the turn's reward, so it survives turn-level credit assignment.
  5. Running out of turns is `truncated`; reaching an end is `terminated`; never both.
  6. VAGEN lets another language model read descriptions of a state; here an environment scores them
     itself (`score_description`).
"""

import functools
import pkgutil
import re
import threading
import zlib
from dataclasses import dataclass, replace
from typing import NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from minragen.support.options import check_options, nearest, options_of, parse_mixture

FORMAT_PENALTY = -0.1  # reward added once to a turn with no action or with an unknown one
LARGEST = 1e15  # largest accepted reward or metric of a step; its square fits float32
MAX_REDRAWS = 20_000  # instances drawn in search of one of the right split before giving up
SEPARATOR = "||"  # between the actions of one turn
IMAGE = "<image>"  # the placeholder of an observation's image
SPLITS = ("train", "val", "test")
# Names of a run's own metrics (docs/metrics.md), which no environment and no metric of one has.
RUN_METRICS = """val test first_turn trajectory gradient step pass@G episode_return reward_std
    groups_kept groups_zero_std rollouts turns response_tokens reply_tokens context_full env_errors
    entropy overlong_penalty grounding worldmodeling env_return policy_loss clip_fraction
    approx_kl kl_ref kl_reward echo_loss grad_norm critic_grad_norm updates_skipped
    logprob_gap regime value_loss explained_variance seconds rollout_seconds rollout_idle waited
    tokens_per_second elapsed valid_thinking distinct_3""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Budget:
    """How much an episode may use: the single source of every such number in a prompt."""

    max_turns: int = 5  # replies of the model
    max_actions_per_turn: int = 1  # actions executed from one reply
    max_actions: int = 5  # actions executed in the whole episode

    def __post_init__(self):
        for field, value in vars(self).items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"bad budget: {field} is {value!r}, expected an integer >= 1.")
        # Prompts and solvers rely on this number, so it is no more than the turns can hold.
        object.__setattr__(self, "max_actions",
                           min(self.max_actions, self.max_turns * self.max_actions_per_turn))


class Outcome(NamedTuple):
    """What one action did."""

    reward: float
    terminated: bool = False  # the episode is over
    success: bool = False
    effective: bool = True  # the state has changed
    metrics: dict | None = None  # name -> number, summed over the episode and logged


class Observation(str):
    """What the model sees after a reset or a step: text, in which `<image>` marks the image.

    image: RGB, (H, W, 3) uint8, or None; a copy is kept, since environments may draw on theirs
    state: TextEnv.state at that time, which EnvGroups notes
    raises: ValueError for another array, or for an image without exactly one placeholder
    """

    def __new__(cls, text, image=None, state=""):
        observation = str.__new__(cls, text)
        if image is not None:
            image = np.array(image)
            if image.dtype != np.uint8 or image.shape[2:] != (3,) or not image.size:
                raise ValueError(f"an image is {image.dtype} of shape {image.shape}, expected "
                                 f"uint8 of shape (H, W, 3).")
            if text.count(IMAGE) != 1:
                raise ValueError(f"an observation with an image has {text.count(IMAGE)} times "
                                 f"{IMAGE}, expected once.")
        observation.image, observation.state = image, state
        return observation


def image_of(observation):
    """The image of an observation; None if it is text alone, or a plain str."""
    return getattr(observation, "image", None)


class TextEnv(gymnasium.Env):
    """A multi-turn text environment: a `gymnasium.Env` whose observations and actions are strings.

    One `step` is one *turn*: the text inside `<answer>` is split on `||` if `multi_action` is True,
    each piece is matched against `actions` ignoring case, and the pieces run until one ends the
    episode or a limit of the budget is reached. An environment writes

        instruction        str or property: the task, told once in the system message
        _reset(rng)        draw an instance from the numpy Generator `rng`
        _act(action)       run one action -> Outcome, or None if it is not an action here
        render()           the state as the model sees it
        solve()            list of answers, one per remaining turn, that reach the maximum reward

    and, if it likes, note, instance, random_answer, shallow_answer, image, describe, ... (below).

    reset(seed=, options={"member": k}) -> (observation, info)
    step(answer) -> (observation, reward, terminated, truncated, info)
    info: `success` and `valid`, 0.0 or 1.0; `effective`, the share of executed actions that changed
        the state; and the `metrics` of the turn's outcomes, summed
    observation: a str; with an image an Observation, which has the line `<image>` exactly once.
        Without an image it never contains `<image>`, whatever data or replies say
    raises: ValueError for unknown options or splits, RuntimeError for a step without a live episode
    """

    metadata = {"render_modes": ["ansi"]}
    budget = Budget()
    actions: tuple = ()  # names of the actions; empty means that any text is passed to _act
    multi_action = False  # whether an answer may hold several actions joined by ||
    parallel = False  # whether a step waits on something (sandbox, server) and belongs in a thread
    # Tells the model how to describe the state, in response formats that ask for it.
    description_language = (
        "In a world with places, say what you see as things and where they are from the player, "
        "such as: goal below right; hole same row left; box above same column; target above left.")
    defaults: dict = {}  # option name -> default; the type of the default is the type of the option
    bundled_data = "generated"  # where its instances come from, for the table of environments
    backend = ""  # external program or server, named in a run's first line
    alias = ""  # what metrics call it, for an environment that `make` found at a server's address
    instruction = ""
    # A reply to an instance that no split contains: its thought and its answer; then, for response
    # formats that ask for them, what it sees and what it predicts. `--example` tells it.
    example: tuple = ()
    state = ""  # what `render_text` returned for the last observation

    def __init__(self, split="train", budget=None, render_mode="ansi", **options):
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}: expected one of {', '.join(SPLITS)}.")
        if render_mode not in self.metadata["render_modes"]:
            raise ValueError(nearest("render_mode", render_mode, self.metadata["render_modes"]))
        self.split = split
        self.budget = budget or self.budget
        if self.budget.max_actions_per_turn > 1 and not self.multi_action:
            raise ValueError(f"{type(self).__name__} takes one action a turn: max_actions_per_turn "
                             f"is {self.budget.max_actions_per_turn}, expected 1.")
        self.options = check_options(type(self).__name__, self.defaults, options)
        self.render_mode = render_mode
        self.observation_space, self.action_space = text_space(), text_space()
        self._live = False
        self.outermost_layer = None  # around it (environments/layers.py)

    # -- what an environment writes --------------------------------------------------------------

    def _reset(self, rng):
        raise NotImplementedError(f"{type(self).__name__} does not write _reset(rng).")

    def _act(self, action):
        raise NotImplementedError(f"{type(self).__name__} does not write _act(action).")

    def render(self):
        raise NotImplementedError(f"{type(self).__name__} does not write render().")

    def render_text(self):
        """The state as text in every render_mode."""
        return self.render()

    def image(self):
        """What a vision-language model sees beside the text: RGB, (H, W, 3) uint8, or None."""

    def solve(self):
        """The answers, one per turn from the current state on, that reach the maximum reward."""
        raise NotImplementedError(f"{type(self).__name__} has no solver.")

    def note(self):
        """One truthful line about the current state, the thought of a good player; "" for none."""
        return ""

    def describe(self):
        """What a perfect description of the current state says."""
        return self.note()

    def score_description(self, text):
        """F1 in [0, 1] of what `text` says about the current state; None if it cannot be graded."""

    def instance(self):
        """The canonical text of a new instance. Its CRC decides which split it belongs to."""
        return self.render_text()

    def instance_split(self):
        """Which split the current instance belongs to."""
        return split_of(self.instance())

    def random_answer(self, rng):
        """A well-formed answer of uniformly drawn actions: a baseline that knows only the rules."""
        if not self.actions:
            raise NotImplementedError(f"{type(self).__name__} does not write random_answer().")
        count = min(self.budget.max_actions_per_turn, self.actions_left) if self.multi_action else 1
        return f" {SEPARATOR} ".join(self.actions[i]
                                     for i in rng.integers(len(self.actions), size=count))

    @staticmethod
    def shallow_answer(texts):
        """The answer of a shallow player, who pastes, matches words or repeats a fixed tactic. A
        model that has learnt the task must beat it.

        texts: what a model has seen: system prompt, observation, answer, observation, ...
        """
        raise NotImplementedError("it does not write shallow_answer().")

    # -- what every environment gets -------------------------------------------------------------

    @property
    def system_prompt(self):
        """Instruction, action names and budget: everything the model is told once."""
        b, said = self.budget, []
        fewer = f" and {b.max_actions} actions" if b.max_actions < b.max_turns else ""
        if self.actions:
            said.append(f"Actions: {', '.join(self.actions)}.")
        if b.max_actions_per_turn > 1:
            how = (f"such as {self.actions[0]} {SEPARATOR} {self.actions[-1]} ." if self.actions
                   else f"joined by {SEPARATOR}.")
            said.append(f"Up to {b.max_actions_per_turn} a turn, {how} "
                        f"You have {b.max_turns} turns and {b.max_actions} actions.")
        elif self.actions:
            said.append(f"One action a turn, {b.max_turns} turns{fewer}.")
        elif b.max_turns > 1:
            said.append(f"You have {b.max_turns} turns{fewer}.")
        return "\n".join(filter(None, [self.instruction, " ".join(said)]))

    def example_parts(self):
        """The example as {part of a response format: text}, cut to the actions of a turn. One is
        made of `actions` where the environment writes none; {} without both."""
        if not (self.example or self.actions):
            return {}
        own = self.example or (f"I try {self.actions[0]} first.",
                               f" {SEPARATOR} ".join(self.actions[:1 + self.multi_action]))
        if not (isinstance(own, (tuple, list)) and len(own) in (2, 4)
                and all(isinstance(text, str) and "</" not in text for text in own)):
            raise ValueError(f"{type(self).__name__}.example is {own!r:.200}, expected (thought, "
                             f"answer), two texts without closing tags.")
        thought, answer, seen, predicted = (*own, "...", "...")[:4]
        if self.multi_action:
            answer = self._in_turns([action.strip() for action in answer.split(SEPARATOR)])[0]
        return {"reasoning": thought, "answer": answer, "observation": seen,
                "prediction": predicted}

    @property
    def turns_left(self):
        return self.budget.max_turns - self._turns

    @property
    def actions_left(self):
        """Actions that can still be executed, no more than the turns left can hold."""
        return min(self.budget.max_actions - self._actions,
                   self.turns_left * self.budget.max_actions_per_turn)

    def reset(self, *, seed=None, options=None):
        """Draw the instance of `seed` that belongs to the split. Returns (observation, info)."""
        super().reset(seed=seed)
        if seed is None:  # Gymnasium's convention: go on from the environment's own stream
            seed = int(self.np_random.integers(2**31))
        member = int((options or {}).get("member", 0))
        # For slips and payouts. `+ 1`, because the streams [seed, 0, ...] below draw the instance.
        self.dynamics = np.random.default_rng([seed, member + 1, 1])
        self._turns = self._actions = 0
        for attempt in range(MAX_REDRAWS):
            self._reset(np.random.default_rng([seed, 0, attempt]))
            if self.instance_split() == self.split:
                break
        else:
            raise RuntimeError(f"{type(self).__name__}: no instance of split {self.split!r} in "
                               f"{MAX_REDRAWS} draws. Give more data or other options, or override "
                               f"instance() (docs/add-an-environment.md).")
        self._live = True
        return self._observe(), {"success": 0.0, "valid": 1.0, "effective": 0.0}

    def step(self, answer):
        """Play one turn. Returns (observation, reward, terminated, truncated, info)."""
        if not self._live:
            raise RuntimeError("step() without a live episode: call reset() first.")
        pieces = answer.split(SEPARATOR) if self.multi_action else [answer]
        pieces = [p for p in (p.strip() for p in pieces) if p]
        outcomes, valid = [], bool(pieces)
        for piece in pieces[:min(self.budget.max_actions_per_turn, self.actions_left)]:
            action = self._match(piece)
            outcome = None if action is None else (self.outermost_layer or self)._act(action)
            if outcome is None:
                valid = False
                continue
            outcomes.append(outcome)
            if outcome.terminated:
                break
        self._turns += 1
        self._actions += len(outcomes)
        # The only turn of a one-turn task ends it by itself: nothing was cut short.
        terminated = self.budget.max_turns == 1 or (bool(outcomes) and outcomes[-1].terminated)
        truncated = not terminated and (self.turns_left == 0 or self.actions_left == 0)
        self._live = not (terminated or truncated)
        reward, info = sum(o.reward for o in outcomes) + (0.0 if valid else FORMAT_PENALTY), {}
        for o in outcomes:
            for name, value in (o.metrics or {}).items():
                info[name] = info.get(name, 0.0) + float(value)
        info |= {"success": float(any(o.success for o in outcomes)), "valid": float(valid),
                 "effective": sum(o.effective for o in outcomes) / max(1, len(outcomes))}
        return self._observe(reward, valid), float(reward), terminated, truncated, info

    def _match(self, piece):
        if not self.actions:
            return piece
        return next((a for a in self.actions if a.lower() == piece.lower()), None)

    def _in_turns(self, plan):
        """Join a list of actions into answers, each with as many actions as a turn may hold."""
        k = self.budget.max_actions_per_turn
        return [f" {SEPARATOR} ".join(plan[i:i + k]) for i in range(0, len(plan), k)]

    def _observe(self, reward=None, valid=True):
        """The last turn's reward, the state, and what is left of the budget."""
        lines = [] if reward is None else [f"Reward: {reward:.4g}"]
        if not valid:
            lines.append("No valid action was given, or not all were valid.")
        # Neither data nor replies can insert an image: theirs becomes "< image>".
        shown = self.outermost_layer or self
        image, self.state = shown.image(), shown.render_text()
        state = self.state.replace(IMAGE, "< image>")
        if image is not None:
            lines.append(IMAGE)
        if state or image is None:  # beside an image the text may be empty
            lines.append(state)
        if self.budget.max_turns > 1 and self._live:
            counted = self.multi_action or self.budget.max_actions < self.budget.max_turns
            left = f", actions left: {self.actions_left}" if counted else ""
            lines.append(f"Turns left: {self.turns_left}{left}")
        return Observation("\n".join(lines), image)


def split_of(instance):
    """The split of an instance's canonical text: six tenths train, two val, two test."""
    bucket = zlib.crc32(instance.encode(errors="replace")) % 10
    return "train" if bucket < 6 else "val" if bucket < 8 else "test"


def text_space(extra="", max_length=16_384):
    """Strings of up to `max_length` characters: ASCII, line breaks, tabs, √ and `extra`."""
    characters = {*map(chr, range(32, 127)), *"\n\t√", *extra}
    return spaces.Text(max_length=max_length, min_length=0, charset=characters)


# name -> package.module:Class, imported when it is asked for
REGISTRY = {name.lower(): f"minragen.environments.{name.lower()}:{name}" for name in (
    "Bandit", "FrozenLake", "Sokoban", "Sudoku", "Countdown", "MetaMathQA", "SearchQA", "WebShop",
    "DeepCoder", "Lean")}
ELSEWHERE = "minragen.environments.elsewhere:find"  # for every other name
LAYERS = "minragen.environments.layers:wrapped"


def make(name, split="train", budget=None, layers=(), **options):
    """Build an environment: a name from `REGISTRY`, `package.module:Class`, a Gymnasium id with
    Text spaces, or `openenv:http://host:port`.

    layers: what is put around it, the last outermost: `action_noise,probability=0.2`
    raises: ValueError with the nearest known name, ImportError naming the missing module or class
    """
    if name in REGISTRY:
        build = pkgutil.resolve_name(REGISTRY[name])
    else:
        build = pkgutil.resolve_name(ELSEWHERE)(name)
    env = build(split=split, budget=budget, **options)
    return pkgutil.resolve_name(LAYERS)(env, layers) if layers else env


class ServerGone(RuntimeError):
    """A tool's server does not answer. An environment raises it before it has changed anything, so
    that the reset or step can be tried again."""


class Failure(Exception):
    """What a reset or a step raised, in words. fault: where it was raised (look/faults.py)"""

    fault = None


def failure_of(error):
    """A Failure that says `ValueError: zzz`, whatever the code of this exception does; of a
    ServerGone a plain one."""
    try:
        name, said = f"{type(error).__name__}", str.__str__(str(error))
    except BaseException:  # whatever its __str__ raises
        name, said = type.__repr__(type(error)), "its text cannot be read"
    gone = issubclass(type(error), ServerGone)
    return ServerGone(said) if gone else Failure(f"{name}: {said}")


def number(x):
    """The float of a number. Raises ValueError for nan, an array, or what is no number."""
    if type(x) is not float and hasattr(x, "__float__") and not getattr(x, "ndim", 0):
        x = float(x)
    if type(x) is not float or not -LARGEST < x < LARGEST:
        raise ValueError(f"{x!r:.50} is not a number below {LARGEST:g}.")
    return x


@functools.lru_cache(2**12)
def metric_name(name):
    """What an environment, or its metric, is called in a run's metrics: another name, which is
    printed, if it is one of RUN_METRICS or has a character that no metric's name may have."""
    name = str.__str__(name)
    if name.partition("/")[0] not in RUN_METRICS and re.fullmatch(r"[\w ./:@%+-]{1,99}", name):
        return name
    other = "env." + re.sub(r"[^\w .:@%+-]", "_", name)[:90]
    print(f"warning   the run uses the metric's name {name!a:.99}, or it has a forbidden "
          f"character, so it is logged as {other!a}", flush=True)
    return other


class EnvGroups:
    """P groups of G members, possibly of several environments: reset together, stepped by row.

    All G members of a group share the instance (same seed) and have their own dynamics (`member`).
    Rows are group-major: `places` has the (group, member) of each. An environment that raised is
    built anew by the next reset. run/groups.py runs those that wait (`parallel`) in threads.

    spec: a mixture; `frozenlake,bandit` splits evenly, `frozenlake=24,bandit=8` as it says
    options: `name.option` addresses one environment of a mixture
    budgets: fields of Budget that replace each environment's own
    share: which of the rows this object holds, as one of several processes does
    layers: as in `make`, around every environment of the mixture
    """

    def __init__(self, spec, num_groups, group_size, split="train", options=None, budgets=None,
                 share=slice(None), layers=()):
        self.num_groups, self.group_size, self.split = num_groups, group_size, split
        self.layers = layers
        self.places = [divmod(row, group_size) for row in range(num_groups * group_size)[share]]
        mixture = parse_mixture(spec, num_groups, REGISTRY)
        self.names = [name for name, count in mixture for _ in range(count)]
        self._given = {}  # name -> what `make` is given to build that environment
        for name in dict.fromkeys(self.names):
            own = options_of(name, options or {}, dict(mixture))
            budget = replace(make(name, split, **own).budget, **(budgets or {}))
            self._given[name] = dict(name=name, split=split, budget=budget, layers=layers, **own)
        self.envs = [make(**self._given[self.names[group]]) for group, _ in self.places]
        self.seeds, self._broken = [None] * num_groups, set()

    def __len__(self):
        return len(self.envs)

    def reset(self, first_seed):
        """Draw new instances: group g gets seed `first_seed + g`. Returns each row's observation,
        or the Failure of its environment."""
        self.seeds = [first_seed + g for g in range(self.num_groups)]
        return self._each(range(len(self)), self._reset_row)

    def _reset_row(self, row):
        group, member = self.places[row]
        if row in self._broken:
            self.envs[row] = make(**self._given[self.names[group]])
            self._broken.remove(row)
        env = self.envs[row]
        first, _ = env.reset(seed=self.seeds[group], options={"member": member})
        for what, text in (("reset() returned", first), ("system_prompt is", env.system_prompt)):
            if not isinstance(text, str):
                raise TypeError(f"{type(env).__name__}.{what} {text!r:.200}, expected a str.")
        return Observation(str.__str__(first), image_of(first), str.__str__(env.state))

    def step(self, rows, replies):
        """Step the given rows. Returns for each what `turn(env, reply)` returned, or the Failure
        that it raised: a fault of the environment, not of the reply (`StopReason.ENV_ERROR`)."""
        reply_of = dict(zip(rows, replies))
        return self._each(rows, lambda row: self.turn(self.envs[row], reply_of[row]))

    failure = staticmethod(failure_of)  # run/groups.py adds where it was raised

    @staticmethod  # run/groups.py may put another one in its place
    def turn(env, reply):
        """What env.step returned, in plain values: Observation, float, bool, bool, {str: float}.
        Raises ValueError if it breaks the contract."""
        result = env.step(reply.answer)
        try:
            shown, reward, terminated, truncated, info = result
            return (Observation(str.__str__(shown), image_of(shown), str.__str__(env.state)),
                    number(reward), bool(number(terminated)), bool(number(truncated)),
                    {metric_name(name): number(x) for name, x in dict.items(info)})
        except (TypeError, ValueError) as problem:
            said = f"{type(env).__name__}.step() returned {result!r:.200}: {problem}"
            raise ValueError(said) from problem

    def _each(self, rows, function):
        """What function(row) returned for each row, or its Failure."""
        return [self.attempt(row, function, row) for row in rows]

    def attempt(self, row, function, *arguments):
        """function(*arguments), or a Failure, which ends the row's episode and not the run. What an
        extension raises in a panic is no Exception. Ctrl-C reaches only the main thread."""
        try:
            return function(*arguments)
        except BaseException as error:
            if (type(error) is KeyboardInterrupt
                    and threading.current_thread() is threading.main_thread()):
                raise
            self._broken.add(row)
            return self.failure(error)
