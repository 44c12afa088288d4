"""What a text environment is: the contract, the budget, the registry, and groups of environments.

Reading order: `Budget` and `TextEnv` (the contract), `make` (the registry), `EnvGroups` (RAGEN's
environment state manager). The ten environments are in minragen/environments, one file each.

Axes: P groups, G members of a group (same instance, own dynamics), K turns.

Tests: `python -m pytest tests/test_envs.py tests/test_env_contract.py`.
"""

import pkgutil
import zlib
from dataclasses import dataclass, replace
from typing import NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from minragen.support.options import check_options, nearest, options_of, parse_mixture

FORMAT_PENALTY = -0.1  # reward added once to a turn with no action or with an unknown one
MAX_REDRAWS = 20_000  # instances drawn in search of one of the right split before giving up
SEPARATOR = "||"  # between the actions of one turn
IMAGE = "<image>"  # the placeholder of an observation's image
SPLITS = ("train", "val", "test")


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

    image: RGB, (H, W, 3) uint8, or None; a copy, since environments may draw on theirs
    state: TextEnv.state at that time, which EnvGroups adds
    """

    def __new__(cls, text, image=None, state=""):
        observation = str.__new__(cls, text)
        observation.image = None if image is None else np.array(image)
        observation.state = state
        return observation


def image_of(observation):
    """The image of an observation; None if it is text alone, or a plain str."""
    return getattr(observation, "image", None)


class TextEnv(gymnasium.Env):
    """A multi-turn text environment: a `gymnasium.Env` whose observations and actions are strings.

    One `step` is one *turn*: the text inside `<answer>` is split on `||` if `multi_action` is True,
    each piece is matched against `actions` ignoring case, and the pieces run until one ends the
    episode. Only the first pieces that the budget allows are looked at; an invalid one counts
    there, but not as an action. An environment writes `instruction`, `_reset`, `_act`, `render`,
    `solve`, and what else it likes.

    info: `success` and `valid`, 0.0 or 1.0; `effective`, the share of executed actions that changed
        the state; and the `metrics` of the turn's outcomes, summed
    observation: an Observation. If it has an image, one of its lines is `<image>`; without an image
        `<image>` is nowhere in it, whatever data or replies say
    raises: ValueError for unknown options or splits, RuntimeError for a step without a live episode
    """

    metadata = {"render_modes": ["ansi"]}
    budget = Budget()
    actions: tuple = ()  # names of the actions; empty means that any text is passed to _act
    multi_action = False  # whether an answer may hold several actions joined by ||
    parallel = False  # whether a step waits on something (sandbox, server) and belongs in a thread
    defaults: dict = {}  # option name -> default; the type of the default is the type of the option
    ranges: dict = {}  # option name -> (least, most), or a list of choices; none for any value
    bundled_data = "generated"  # where its instances come from, for the table of environments
    backend = ""  # external program or server, named in a run's first line
    alias = ""  # what metrics call it, for an environment that `make` found at a server's address
    instruction = ""  # or a property: the task, told once in the system message
    # What `--example` shows: thought and answer for an instance that no split contains, so it is
    # never played; in formats with descriptions also what is seen and what is predicted.
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
        self.options = check_options(type(self).__name__, self.defaults, options, self.ranges)
        self.render_mode = render_mode
        self.observation_space, self.action_space = text_space(), text_space()
        self._live = False
        self.outermost_layer = None  # if wrapped: whose _act, image, render_text run instead

    # -- what an environment writes --------------------------------------------------------------

    def _reset(self, rng):
        """Draw an instance from the numpy Generator `rng`."""
        raise NotImplementedError(f"{type(self).__name__} does not write _reset(rng).")

    def _act(self, action):
        """Run one action. Returns its Outcome, or None if it is not an action here."""
        raise NotImplementedError(f"{type(self).__name__} does not write _act(action).")

    def render(self):
        """The state as text. The model sees it, unless `render_text` says otherwise."""
        raise NotImplementedError(f"{type(self).__name__} does not write render().")

    def render_text(self):
        """The text part of what the model sees; by default render()."""
        return self.render()

    def image(self):
        """What a vision-language model sees beside the text: RGB, (H, W, 3) uint8, or None."""

    def solve(self):
        """The answers that earn most: the next turn's, and later ones where they can be known."""
        raise NotImplementedError(f"{type(self).__name__} has no solver.")

    def note(self):
        """One truthful line about the current state, the thought of a good player; "" for none."""
        return ""

    def thought(self):
        """The thought shown to a pretrained model; a sentence teaches more than a list."""
        return self.note()

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
        """The answer of a player who pastes, matches words or repeats a fixed tactic, given the
        texts that a model has seen: system prompt, observation, answer, observation, ... A model
        that has learnt the task must beat it."""
        raise NotImplementedError("it does not write shallow_answer().")

    # -- what every environment gets -------------------------------------------------------------

    @property
    def system_prompt(self):
        """Instruction, action names, budget: the environment's part of what is told once."""
        b, said = self.budget, []
        fewer = f" and {b.max_actions} actions" if b.max_actions < b.max_turns else ""
        if self.actions:
            said.append(f"Actions: {', '.join(self.actions)}.")
        if b.max_actions_per_turn > 1:
            how = (f"such as {self.actions[0]} {SEPARATOR} {self.actions[-1]} ." if self.actions
                   else f"joined by {SEPARATOR}.")
            said.append(f"Up to {b.max_actions_per_turn} a turn, {how} "
                        f"You have {b.max_turns} turns and {b.max_actions} actions.")
        elif self.actions or b.max_turns > 1:
            how = "One action a turn," if self.actions else "You have"
            said.append(f"{how} {b.max_turns} turns{fewer}.")
        return "\n".join(filter(None, [self.instruction, " ".join(said)]))

    def example_parts(self):
        """{part of a response format: text}, with the actions of one turn. Without `example` it is
        made from `actions`; without both it is {}."""
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
        """Draw the instance of `seed` that belongs to the split, with the dynamics of
        `options["member"]`. Returns (observation, info)."""
        super().reset(seed=seed)
        if seed is None:  # Gymnasium's convention: go on from the environment's own stream
            seed = int(self.np_random.integers(2**31))
        member = int((options or {}).get("member", 0))
        # For slips and payouts. Key 0 below is the instance's, so members begin at 1.
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
        # A task of one turn terminates with it: it is never truncated.
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
    """Build an environment: a name from `REGISTRY`, `package.module:Class`, or
    `openenv:http://host:port`.

    layers: what is put around it, the last outermost: `action_noise,probability=0.2`
    raises: ValueError with the nearest known name, ImportError naming the missing module or class
    """
    build = (pkgutil.resolve_name(REGISTRY[name]) if name in REGISTRY else
             pkgutil.resolve_name(ELSEWHERE)(name))
    env = build(split=split, budget=budget, **options)
    return pkgutil.resolve_name(LAYERS)(env, layers) if layers else env


class EnvGroups:
    """P groups of G members, possibly of several environments: reset together, stepped by row.

    All G members of a group share the instance (same seed) and have their own dynamics (`member`).
    Rows are group-major: `places` has the (group, member) of each. What an environment raises is
    raised here; a run has the subclass of run/groups.py, which ends the row's episode instead.

    spec: a mixture; `frozenlake,bandit` splits evenly, `frozenlake=24,bandit=8` as it says
    options: `name.option` addresses one environment of a mixture
    budgets: fields of Budget that replace each environment's own
    share: the slice of all rows that this process holds
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
        self.seeds = [None] * num_groups

    def __len__(self):
        return len(self.envs)

    def name_of(self, row):
        """What metrics call the environment of a row."""
        return self.envs[row].alias or self.names[self.places[row][0]]

    def reset(self, first_seed):
        """Draw the instance of seed `first_seed + g` in group g. Returns each row's Observation."""
        self.seeds = [first_seed + g for g in range(self.num_groups)]
        return self.each(range(len(self)), self.begin)

    def begin(self, row):
        (group, member), env = self.places[row], self.envs[row]
        return self.observed(env, env.reset(seed=self.seeds[group], options={"member": member})[0])

    def step(self, rows, replies):
        """Returns for each of the given rows what `turn(env, reply)` returns."""
        reply_of = dict(zip(rows, replies))
        return self.each(rows, lambda row: self.turn(self.envs[row], reply_of[row]))

    @classmethod
    def turn(cls, env, reply):
        """What env.step returns of a Reply: Observation, reward, terminated, truncated, info."""
        observation, *rest = env.step(reply.answer)
        return (cls.observed(env, observation), *rest)

    @staticmethod
    def observed(env, observation):
        """The Observation that an environment returned, with its state."""
        return Observation(observation, image_of(observation), env.state)

    def each(self, rows, function):
        return [function(row) for row in rows]

    def attempt(self, row, function, *arguments):
        """function(*arguments); in run/groups.py what it raised is returned as a Failure."""
        return function(*arguments)
