"""What a text environment is, and the two smallest ones.

Reading order: `Budget` and `TextEnv` (the contract), `make` (the registry), `EnvGroups` (what RAGEN
calls the environment state manager), then Bandit and FrozenLake. The other eight: games.py (boards
and numbers), tasks.py (questions, programs, shops and proofs).

Axes: P groups, G members of a group (same instance, own dynamics), K turns.

Deltas (from RAGEN V2's environments and its `es_manager`):
  1. The instance comes from `seed` alone and the dynamics from `(seed, member)`. In RAGEN all
     members share the slip stream, and Bandit's members do not even share their prompt.
  2. `train`, `val` and `test` are disjoint by *instance*: a CRC of the instance's text names its
     split and generation re-draws until it fits. RAGEN separates seeds; small worlds then share
     instances.
  3. Every number the model is told comes from the one `Budget`, and both limits (turns and actions)
     are shown. RAGEN announces budgets that its own caps make unreachable.
  4. The format penalty is part of the turn's reward, so it survives turn-level credit assignment.
  5. Running out of turns is `truncated`; reaching an end is `terminated`; never both.
  6. VAGEN has another language model read what was said of a state; here it is said in a language
     that a few lines can read (`read_relations`). VAGEN's Sokoban also takes 0.1 off for one of the
     five most frequent descriptions so far; that state outlives the episode and is left out.

See one at work: `python -m minragen.envs frozenlake`.
"""

import difflib
import importlib
import os
import re
import sys
import threading
import time
import zlib
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations
from typing import NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

FORMAT_PENALTY = -0.1  # reward added once to a turn with no action or with an unknown one
MAX_REDRAWS = 20_000  # instances drawn in search of one of the right split before giving up
STEP_TIME_LIMIT = 60.0  # seconds of a core that one step of a `parallel` environment may take
SEPARATOR = "||"  # between the actions of one turn
CHARSET = frozenset(map(chr, range(32, 127))) | frozenset("\n\t√")
SPLITS = ("train", "val", "test")
# Where a thing is from the player, by the sign of its row (column) minus the player's: 0, 1, -1.
VERTICAL, HORIZONTAL = ("same row", "below", "above"), ("same column", "right", "left")
RELATIONS_TOLD = ("In a world with places, say what you see as things and where they are from the "
                  "player, such as: goal below right; hole same row left; box above same column; "
                  "target above left.")


@dataclass(frozen=True)
class Budget:
    """How much an episode may use: the single source of every such number in a prompt.

    max_turns: replies of the model      max_actions_per_turn: actions executed from one reply
    max_actions: actions executed in the whole episode
    """

    max_turns: int = 5
    max_actions_per_turn: int = 1
    max_actions: int = 5

    def __post_init__(self):
        for field, value in vars(self).items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"bad budget: {field} is {value!r}, expected an integer of at "
                                 f"least 1.")
        # Never more actions than the turns can hold: what is announced and planned with must be
        # within reach.
        object.__setattr__(self, "max_actions",
                           min(self.max_actions, self.max_turns * self.max_actions_per_turn))


class Outcome(NamedTuple):
    """What one action did. `effective`: it changed the state. `terminated`: the episode is over.
    `metrics`: name -> number, to be summed over the episode and logged."""

    reward: float
    terminated: bool = False
    success: bool = False
    effective: bool = True
    metrics: dict | None = None


class TextEnv(gymnasium.Env):
    """A multi-turn text environment: a `gymnasium.Env` whose observations and actions are strings.

    One `step` is one *turn*: the text inside `<answer>` goes in, is split on `||` where
    `multi_action`, each piece is matched against `actions` ignoring case, and the pieces run until
    one ends the episode or a cap of the budget is reached. An environment writes only

        instruction        str or property: the task, told once in the system message
        _reset(rng)        draw an instance from the numpy Generator `rng`
        _act(action)       run one action -> Outcome, or None if it is not an action here
        render()           the state as the model sees it
        solve()            list of answers, one per remaining turn, that reach the maximum reward

    and, optionally, `note()` (one truthful line about the state: the thought a good player would
    have), `instance()` (canonical text whose CRC decides the split), `random_answer(rng)`,
    `texts(seed)` (what tiny's tokenizer is built from) and `relations()` with `relation_weights`
    (what there is to be described, and graded).

    reset(seed=, options={"member": k}) -> (observation, info)
    step(answer) -> (observation, reward, terminated, truncated, info)
    info: `success`, `valid`, `effective`, each 0.0 or 1.0 (`effective`: share of executed actions),
        and the summed `metrics` of the turn's outcomes.
    raises: ValueError for unknown options or splits, RuntimeError for a step without a live
        episode.
    """

    metadata = {"render_modes": ["ansi"]}
    budget = Budget()
    actions: tuple = ()  # names of the actions; empty means that any text is passed to _act
    # What a thoughtless player always does (the warm-up's demonstrator falls back on it).
    habit: str = ""
    # Probability that a turn of the warm-up's demonstrator is the solver's. Where one needs to see
    # the fruit of a good turn to learn what to make of it, weak play must not be too weak.
    expert = 0.3
    multi_action = False  # whether an answer may hold several actions joined by ||
    parallel = False  # whether a step waits on something (sandbox, server) and belongs in a thread
    # Kind of thing -> its share in the F1 of a description; without any, nothing can be graded.
    relation_weights: dict = {}
    relation_near = 0.5  # worth of a claim of which one of two relations is right; at most 0.5
    defaults: dict = {}  # option name -> default; the type of the default is the type of the option
    data_in_the_box = "generated"  # where its instances come from, for the table of environments
    backend = ""  # what outside of this process decides, if anything: named in a run's first line
    instruction = ""

    def __init__(self, split="train", budget=None, **options):
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}: expected one of {', '.join(SPLITS)}.")
        self.split = split
        self.budget = budget or self.budget
        self.options = {**self.defaults,
                        **check_options(type(self).__name__, self.defaults, options)}
        self.render_mode = "ansi"
        self.observation_space, self.action_space = text_space(), text_space()
        self._live = False

    # -- what an environment writes --------------------------------------------------------------

    def _reset(self, rng):
        raise NotImplementedError(f"{type(self).__name__} does not write _reset(rng).")

    def _act(self, action):
        raise NotImplementedError(f"{type(self).__name__} does not write _act(action).")

    def solve(self):
        """The answers, one per turn from the current state on, that reach the maximum reward."""
        raise NotImplementedError(f"{type(self).__name__} has no solver.")

    def note(self):
        """One truthful line about the current state, or nothing."""
        return ""

    def relations(self):
        """What a perfect description of the current state would claim, [(kind, vertical,
        horizontal), ...] as `read_relations` gives it, or None where nothing has a place."""

    def instance(self):
        """The canonical text of the fresh instance; its CRC decides which split it belongs to."""
        return self.render()

    def instance_split(self):
        """Which split the current instance belongs to."""
        return split_of(self.instance())

    def random_answer(self, rng):
        """A well-formed answer of uniformly drawn actions: the baseline of knowing only the
        rules."""
        if not self.actions:
            raise NotImplementedError(f"{type(self).__name__} takes any text: it has no random "
                                      f"policy unless it writes random_answer().")
        count = min(self.budget.max_actions_per_turn, self.actions_left) if self.multi_action else 1
        return f" {SEPARATOR} ".join(self.actions[i]
                                     for i in rng.integers(len(self.actions), size=count))

    def texts(self, seed):
        """What is said in a random episode of `seed`: the words that `tiny`'s tokenizer will know.

        Override it where playing is slow.
        """
        rng = np.random.default_rng(seed)
        observation, over, turn = self.reset(seed=seed)[0], False, 0
        while not over and turn < 20:
            answer = self.random_answer(rng)
            yield from (observation, f" {self.note()}", f" {answer}")
            observation, _, terminated, truncated, _ = self.step(answer)
            over, turn = terminated or truncated, turn + 1
        yield observation

    # -- what every environment gets -------------------------------------------------------------

    @property
    def system_prompt(self):
        """Instruction, action names and budget: everything the model is told once."""
        b, lines = self.budget, [self.instruction]
        if self.actions and self.multi_action:
            pair = f", such as {self.actions[0]} {SEPARATOR} {self.actions[-1]} "
            example = pair if b.max_actions_per_turn > 1 else ""
            lines.append(f"Actions: {', '.join(self.actions)}. Up to {b.max_actions_per_turn} "
                         f"a turn{example}. "
                         f"You have {b.max_turns} turns and {b.max_actions} actions.")
        elif self.actions:
            fewer = f" and {b.max_actions} actions" if b.max_actions < b.max_turns else ""
            lines.append(f"Actions: {', '.join(self.actions)}. One action a turn, "
                         f"{b.max_turns} turns{fewer}.")
        elif self.multi_action:
            lines.append(f"Up to {b.max_actions_per_turn} a turn, joined by {SEPARATOR}. "
                         f"You have {b.max_turns} turns and {b.max_actions} actions.")
        elif b.max_turns > 1:
            lines.append(f"You have {b.max_turns} turns.")
        return "\n".join(line for line in lines if line)

    @property
    def turns_left(self):
        return self.budget.max_turns - self._turns

    @property
    def actions_left(self):
        """What can still be executed: the episode's rest, and no more than the turns left can
        hold."""
        return min(self.budget.max_actions - self._actions,
                   self.turns_left * self.budget.max_actions_per_turn)

    def reset(self, *, seed=None, options=None):
        """Draw the instance of `seed` that belongs to the split. Returns (observation, info)."""
        super().reset(seed=seed)
        if seed is None:  # Gymnasium's convention: go on from the environment's own stream
            seed = int(self.np_random.integers(2**31))
        member = int((options or {}).get("member", 0))
        # Slips and payouts: one stream per member. From 1 on, because [seed, 0, 1] is the second
        # attempt's below, and member 0 would slip by the very numbers that placed its holes.
        self.dynamics = np.random.default_rng([seed, member + 1, 1])
        self._turns = self._actions = 0
        for attempt in range(MAX_REDRAWS):
            self._reset(np.random.default_rng([seed, 0, attempt]))
            if self.instance_split() == self.split:
                break
        else:
            raise RuntimeError(f"{type(self).__name__}: no instance of split {self.split!r} in "
                               f"{MAX_REDRAWS} draws. Give more data or other options; in "
                               f"an environment of your own, override instance_split().")
        self._live = True
        return self._observe(), {"success": 0.0, "valid": 1.0, "effective": 0.0}

    def step(self, answer):
        """Play one turn. Returns (observation, reward, terminated, truncated, info)."""
        if not self._live:
            raise RuntimeError("step() without a live episode: it has ended or never began. "
                               "Call reset() first.")
        pieces = answer.split(SEPARATOR) if self.multi_action else [answer]
        pieces = [p for p in (p.strip() for p in pieces) if p]
        outcomes, valid = [], bool(pieces)
        for piece in pieces[:min(self.budget.max_actions_per_turn, self.actions_left)]:
            action = self._match(piece)
            outcome = None if action is None else self._act(action)
            if outcome is None:
                valid = False
                continue
            outcomes.append(outcome)
            if outcome.terminated:
                break
        self._turns += 1
        self._actions += len(outcomes)
        # A task of one turn is over after it, whatever was said; only a cut of a longer one is a
        # truncation.
        terminated = self.budget.max_turns == 1 or (bool(outcomes) and outcomes[-1].terminated)
        truncated = not terminated and (self.turns_left == 0 or self.actions_left == 0)
        self._live = not (terminated or truncated)
        reward = sum(o.reward for o in outcomes) + (0.0 if valid else FORMAT_PENALTY)
        info = {"success": float(any(o.success for o in outcomes)), "valid": float(valid),
                "effective": sum(o.effective for o in outcomes) / max(1, len(outcomes))}
        for o in outcomes:
            for name, value in (o.metrics or {}).items():
                info[name] = info.get(name, 0.0) + float(value)
        return self._observe(reward, valid), float(reward), terminated, truncated, info

    def description_f1(self, text, relations):
        """F1 in [0, 1] of what a text claims, against what `relations()` said of the state that it
        is about."""
        return relation_f1(read_relations(text), relations, self.relation_weights,
                           self.relation_near)

    def _match(self, piece):
        if not self.actions:
            return piece
        return next((a for a in self.actions if a.lower() == piece.lower()), None)

    def _in_turns(self, plan):
        """A list of actions as answers, each with as many as a turn may hold."""
        k = self.budget.max_actions_per_turn
        return [f" {SEPARATOR} ".join(plan[i:i + k]) for i in range(0, len(plan), k)]

    def _fitted(self, text, most):
        """`text` cut at `most` characters, with a ? for those that no observation may hold."""
        text = text if len(text) <= most else f"{text[:most]}..."
        allowed = self.observation_space.character_set
        return "".join(c if c in allowed else "?" for c in text)

    def _observe(self, reward=None, valid=True):
        """The last turn's reward, the state, and what is left of the budget."""
        lines = [] if reward is None else [f"Reward: {reward:.4g}"]
        if not valid:
            lines.append("No valid action was given, or not all were valid.")
        lines.append(self.render())
        if self.budget.max_turns > 1 and self._live:
            left = f", actions left: {self.actions_left}" if self.multi_action else ""
            lines.append(f"Turns left: {self.turns_left}{left}")
        return "\n".join(lines)


def split_of(instance):
    """The split of an instance's canonical text: six tenths train, two val, two test."""
    bucket = zlib.crc32(instance.encode(errors="replace")) % 10
    return "train" if bucket < 6 else "val" if bucket < 8 else "test"


def text_space(extra="", max_length=16_384):
    """Strings of up to `max_length` characters: ASCII, what the boards need, and those of
    `extra`."""
    return spaces.Text(max_length=max_length, min_length=0, charset=CHARSET | set(extra))


def nearest(kind, name, known):
    """The sentence for an unknown name: what was given, the likely meaning, and all that is
    known."""
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f" did you mean {close[0]!r}?" if close else ""
    return f"unknown {kind} {name!r}:{hint} Known: {', '.join(known) or 'none'}."


def check_options(owner, defaults, options):
    """Options with the types of their defaults. Raises ValueError for unknown names and wrong
    types."""
    checked = {}
    for name, value in options.items():
        if name not in defaults:
            raise ValueError(nearest(f"option of {owner}", name, sorted(defaults)))
        want = type(defaults[name])
        checked[name] = float(value) if want is float and type(value) is int else value
        if type(checked[name]) is not want or (want is float and not abs(checked[name]) < 1e9):
            raise ValueError(f"option {name} of {owner}: got {value!r}, expected {want.__name__} "
                             f"such as {defaults[name]!r}.")
    return checked


# name -> where the class is; games and tasks are imported when one of theirs is asked for.
REGISTRY = {"bandit": "minragen.envs:Bandit", "frozenlake": "minragen.envs:FrozenLake",
            "sokoban": "minragen.games:Sokoban", "metamathqa": "minragen.tasks:MetaMathQA",
            "searchqa": "minragen.tasks:SearchQA", "webshop": "minragen.tasks:WebShop",
            "sudoku": "minragen.games:Sudoku", "countdown": "minragen.games:Countdown",
            "deepcoder": "minragen.tasks:DeepCoder", "lean": "minragen.tasks:Lean"}


def make(name, split="train", budget=None, **options):
    """Build an environment: a name from `REGISTRY`, `package.module:Class`, or a Gymnasium id
    with Text spaces.

    raises: ValueError with the nearest known name, ImportError naming the missing module or class.
    """
    spec = REGISTRY.get(name, name)
    if ":" not in spec and spec not in gymnasium.registry:
        raise ValueError(nearest("env", name, sorted(REGISTRY)) + " Or give package.module:Class.")
    module_name, colon, attribute = spec.rpartition(":")
    if colon and (not module_name.strip(".") or module_name.startswith(".") or not attribute):
        raise ValueError(f"bad env {name!r}: expected package.module:Class.")
    if module_name:
        if "" not in sys.path:  # unlike `-m`, a console entry point skips the current folder
            sys.path.insert(0, "")
        module = importlib.import_module(module_name)
        cls = getattr(module, attribute, None)
        if cls in (TextEnv, Board, GymnasiumText):
            raise ValueError(f"env {name!r} is the base of environments, not one itself.")
        if isinstance(cls, type) and issubclass(cls, TextEnv):
            return cls(split=split, budget=budget, **options)
        if attribute not in gymnasium.registry:
            raise ValueError(f"env {name!r}: {module_name} has no TextEnv class and registers no "
                             f"Gymnasium id called {attribute!r}.")
    return GymnasiumText(attribute, split=split, budget=budget, **options)


class EnvGroups:
    """P groups of G members, possibly of several environments: reset together, stepped by row.

    All G members of a group share the instance (same seed) and have their own dynamics (`member`).
    Rows are group-major: row = group * G + member. `spec` is a mixture: `frozenlake,bandit` splits
    the groups evenly (the first ones take the remainder), `frozenlake=12,bandit=4` as given.

    budgets: optional dict of Budget fields that replace each environment's own
    options: dict of options; `name.option` addresses one environment of a mixture
    raises: ValueError if the counts do not add up to `num_groups`
    """

    def __init__(self, spec, num_groups, group_size, split="train", options=None, budgets=None):
        self.num_groups, self.group_size, self.split = num_groups, group_size, split
        self.names = [name for name, count in parse_mixture(spec, num_groups) for _ in range(count)]
        per_name = {n: _options_of(n, options or {}, set(self.names))
                    for n in dict.fromkeys(self.names)}
        own = {n: make(n, split, **per_name[n]).budget for n in per_name}
        self._build = [partial(make, n, split, replace(own[n], **(budgets or {})), **per_name[n])
                       for n in self.names for _ in range(group_size)]
        self.envs = [build() for build in self._build]
        self.seeds = [None] * num_groups

    def __len__(self):
        return len(self.envs)

    def reset(self, first_seed):
        """Group g gets the instance of seed `first_seed + g`. Returns the observations of all
        rows."""
        self.seeds = [first_seed + g for g in range(self.num_groups)]
        return [env.reset(seed=self.seeds[row // self.group_size],
                          options={"member": row % self.group_size})[0]
                for row, env in enumerate(self.envs)]

    def step(self, rows, answers):
        """Step the given rows. Returns what each `env.step` returned, or the exception it raised.

        Environments that declare `parallel` run in threads, all under one limit: STEP_TIME_LIMIT,
        times the steps that share a core. One that raises or hangs is the caller's to count
        (`StopReason.ENV_ERROR`) and leaves the others untouched.
        """
        results, waiting = {}, {}
        for r, answer in zip(rows, answers):
            if self.envs[r].parallel:  # daemons: Python waits for all other threads at its exit
                arguments = (results, r, self.envs[r], answer)
                waiting[r] = threading.Thread(target=self._step_row, args=arguments, daemon=True)
                waiting[r].start()
        for r, answer in zip(rows, answers):
            if r not in waiting:
                self._step_row(results, r, self.envs[r], answer)
        # Of all together, not of one after the other.
        limit = STEP_TIME_LIMIT * max(1.0, len(waiting) / (os.cpu_count() or 1))
        deadline = time.monotonic() + limit
        for thread in waiting.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        finished = dict(results)
        for r in waiting.keys() - finished.keys():
            env = self.envs[r]
            finished[r] = TimeoutError(f"{type(env).__name__}: a step took more than "
                                       f"{limit:g} seconds.")
            # The old one is still in its thread and must not meet the next episode.
            self.envs[r] = self._build[r]()
        return [finished[r] for r in rows]

    @staticmethod
    def _step_row(results, row, env, answer):
        try:
            results[row] = env.step(answer)
        except Exception as error:  # a broken environment is data, not a crash
            results[row] = error


def parse_mixture(spec, num_groups):
    """`frozenlake,bandit` or `frozenlake=12,bandit=4` -> [(name, groups), ...] that add up to
    num_groups."""
    parts = [p.strip() for p in spec.split(",") if p.strip()]
    if not parts:
        raise ValueError(f"empty env: got {spec!r}. Known: {', '.join(sorted(REGISTRY))}.")
    names, _, counts = zip(*([word.strip() for word in p.partition("=")] for p in parts))
    if not any(counts):
        base, extra = divmod(num_groups, len(parts))
        numbers = [base + (i < extra) for i in range(len(parts))]
    elif all(c.isdecimal() for c in counts):
        numbers = [int(c) for c in counts]
    else:
        raise ValueError(f"bad mixture {spec!r}: give a number of groups to every environment or "
                         f"to none.")
    if sum(numbers) != num_groups or min(numbers) < 1:
        raise ValueError(f"bad mixture {spec!r}: {numbers} groups, expected {num_groups} in all "
                         f"and at least one each. Change the numbers or --num-groups.")
    return list(zip(names, numbers))


def _options_of(name, options, names):
    """The options meant for environment `name`: bare ones and those written `name.option`."""
    mine = {}
    # The addressed ones come last and win.
    for key, value in sorted(options.items(), key=lambda item: "." in item[0]):
        owner, dot, option = key.rpartition(".")
        if dot and owner not in names:
            raise ValueError(nearest("env in an option", owner, sorted(names)))
        if option in ("self", "name", "split", "budget"):
            raise ValueError(f"{option!r} is not an option of an environment.")
        if not dot or owner == name:
            mine[option] = value
    return mine


class GymnasiumText(TextEnv):
    """Adapter: a registered Gymnasium environment whose observation and action spaces are Text."""

    def __init__(self, env_id, split="train", budget=None, **options):
        try:
            self.inner = gymnasium.make(env_id, **options)
        except TypeError as error:
            raise ValueError(f"env {env_id!r} does not take these options: {error}.") from None
        for space in (self.inner.observation_space, self.inner.action_space):
            if not isinstance(space, spaces.Text):
                raise ValueError(f"env {env_id!r} has a {type(space).__name__} space, expected "
                                 f"Text spaces.")
        super().__init__(split, budget)
        self.instruction = str(self.inner.unwrapped.__doc__ or env_id).strip()

    def _reset(self, rng):
        self._text, _ = self.inner.reset(seed=int(rng.integers(2**31)))
        # The instance is drawn; from here on each member for itself.
        self.inner.unwrapped.np_random = self.dynamics

    def _act(self, action):
        if not self.inner.action_space.contains(action):
            return None
        self._text, reward, terminated, truncated, info = self.inner.step(action)
        return Outcome(float(reward), terminated or truncated, bool(info.get("success", False)))

    def render(self):
        return self._text

    def random_answer(self, rng):
        self.inner.action_space.seed(int(rng.integers(2**31)))
        return self.inner.action_space.sample()


# ==================================================================================================
# What was said of a state


def relation(player, cell):
    """(vertical, horizontal): where a cell is from the player's, both (row, column)."""
    (r, c), (row, column) = player, cell
    return VERTICAL[(row > r) - (row < r)], HORIZONTAL[(column > c) - (column < c)]


def relations_text(relations):
    """The description of a list of (kind, vertical, horizontal): `goal below right; hole same row
    left`."""
    return "; ".join(" ".join(claim) for claim in relations) or "none"


CLAIM = re.compile(rf"(\w+) ({'|'.join(VERTICAL)}) ({'|'.join(HORIZONTAL)})")


def read_relations(text):
    """What a model claims: the clauses of a text that are in the language, in their order.

    Clauses end at a semicolon, a full stop or a line; case and blanks do not matter. Any other
    clause claims nothing. It is no false positive, since nobody can say of which kind: it finds no
    true thing either, so it cannot pay, and a model may think aloud around its claims.
    """
    clauses = re.split(r"[;.\n]", text.lower())
    found = (CLAIM.fullmatch(" ".join(clause.split())) for clause in clauses)
    return [match.groups() for match in found if match]


def relation_f1(claimed, true, weights, near=0.5):
    """How well claims describe a state: VAGEN's F1 over a best matching of claims to true things.

        score(kind) = max over one-to-one matchings of the sum of (1 where both relations agree,
                      `near` where one of them does, else 0)
        F1(kind)    = 2 score / (number claimed + number true)
        returns       sum_k weight_k F1_k / sum_k weight_k, over the kinds that either list has;
                      1 if there are none. Kinds without a weight are ignored.

    claimed, true: lists of (kind, vertical, horizontal)      weights: kind -> positive number
    near: at most 0.5 (VAGEN: 0.5 in FrozenLake, 0 in Sokoban)

    Claiming everything does not pay: with one true thing, all nine claims have F1 0.2.
    """
    weighted = present = 0.0
    for kind, weight in weights.items():
        said, there = ([where for k, *where in claims if k == kind] for claims in (claimed, true))
        if said or there:
            score = _best_matching(map(tuple, said), map(tuple, there), near)
            weighted += weight * 2 * score / (len(said) + len(there))
            present += weight
    return weighted / present if present else 1.0


def _best_matching(claimed, true, near):
    """The greatest sum of a one-to-one matching of pairs worth 1, `near` <= 0.5 or 0.

    Exact pairs first loses nothing: giving one up makes room for two others at best, and those are
    worth 2 * near <= 1. The rest is a maximum matching on "one relation agrees", found as a minimum
    cut (Ford and Fulkerson 1956). Left-over claims and left-over things have no place in common, so
    of the nine places the smaller side has at most four: sixteen subsets to try, however long the
    lists are.
    """
    claimed, true = Counter(claimed), Counter(true)
    exact = claimed & true
    few, many = sorted((claimed - exact, true - exact), key=len)
    subsets = chain.from_iterable(combinations(few, n) for n in range(len(few) + 1))
    matched = min(few.total() - sum(few[a] for a in chosen)
                  + sum(n for (v, h), n in many.items() if any(v == a or h == b for a, b in chosen))
                  for chosen in subsets)
    return exact.total() + near * matched


# ==================================================================================================
# Two environments


class Bandit(TextEnv):
    """Two arms whose names hint at their risk; one pull.

    Goal: choose the arm with the higher expected payout.
    Observation: the two names, in an order that belongs to the instance.
    Actions: an arm's name.
    Reward: the safe arm pays 0.1; the risky arm pays 1 with probability 0.25, else 0.
    Ends when: one arm has been pulled.
    Solver: names the arm with the higher mean.

    Splits: `train` has each known pair in one order, `val` the same pairs in the other order,
    `test` has pairs of names never seen. Success is having chosen the better arm, whatever it paid.

    Options: `low_reward`, `high_reward`, `high_miss` (the risky arm's payout when it does not hit),
    `high_prob`, and `reversed`: the risky-sounding name pays like the safe arm and the other way
    round (V1's BanditRev), so that prior belief about names is wrong.

    The solver at seed 2 (`python -m minragen.envs bandit 2`):

        Two arms: Artist and Planner. Which pays more on average?
        <answer> Artist </answer>
        Reward: 1
        Artist paid 1
    """

    budget = Budget(max_turns=1, max_actions_per_turn=1, max_actions=1)
    data_in_the_box = "20 pairs of names"
    defaults = {"low_reward": 0.1, "high_reward": 1.0, "high_miss": 0.0, "high_prob": 0.25,
                "reversed": False}
    instruction = ("You play a bandit with two arms. What an arm pays is related to its name: "
                   "think about what the names mean. Answer with the name of one arm.")
    KNOWN = (("Teacher", "Trader"), ("Nurse", "StartupFounder"), ("Librarian", "Investor"),
             ("Accountant", "StockBroker"), ("Engineer", "RealEstateAgent"),
             ("Pharmacist", "Musician"), ("Clerk", "Freelancer"), ("Technician", "Youtuber"),
             ("Planner", "Artist"), ("Postman", "Pilot"), ("Banker", "VentureCapitalist"),
             ("Gardener", "Cryptominer"))
    UNSEEN = (("Receptionist", "Explorer"), ("Archivist", "Filmmaker"),
              ("Bookkeeper", "Consultant"), ("SocialWorker", "Photographer"),
              ("Mechanic", "GameDesigner"), ("Secretary", "Entrepreneur"),
              ("Cashier", "DataScientist"), ("CivilServant", "StartupAccelerator"))

    def __init__(self, split="train", budget=None, **options):
        super().__init__(split, budget, **options)
        if not 0 <= self.options["high_prob"] <= 1:
            raise ValueError(f"option high_prob of Bandit: got {self.options['high_prob']}, "
                             f"expected 0 to 1.")

    def _reset(self, rng):
        pairs = self.KNOWN + self.UNSEEN
        self.safe, self.risky = pairs[rng.integers(len(pairs))]
        names = [self.safe, self.risky]
        self.actions = tuple(names if rng.random() < 0.5 else names[::-1])
        self.habit = self.actions[0]
        self.paid = ""

    def instance_split(self):
        """Known pairs: one order is train, the other val. Unseen pairs: test."""
        if (self.safe, self.risky) in self.UNSEEN:
            return "test"
        # A CRC bit of the pair says which order is trained on, so that position tells nothing over
        # the pairs.
        safe_first_in_train = zlib.crc32(f"{self.safe} {self.risky}".encode()) % 2 == 0
        return "train" if (self.actions[0] == self.safe) == safe_first_in_train else "val"

    @property
    def system_prompt(self):
        return self.instruction  # the arms belong to the instance and stand in the observation

    def _act(self, action):
        o = self.options
        gamble = (action == self.risky) != o["reversed"]
        hit = self.dynamics.random() < o["high_prob"]
        reward = (o["high_reward"] if hit else o["high_miss"]) if gamble else o["low_reward"]
        self.paid = f"{action} paid {reward:.4g}"
        return Outcome(reward, terminated=True, success=action == self._better())

    def _better(self):
        o = self.options
        gamble_mean = o["high_prob"] * o["high_reward"] + (1 - o["high_prob"]) * o["high_miss"]
        gamble_wins = gamble_mean > o["low_reward"]
        return self.risky if gamble_wins != o["reversed"] else self.safe

    def render(self):
        return self.paid or (f"Two arms: {self.actions[0]} and {self.actions[1]}. "
                             f"Which pays more on average?")

    def note(self):
        return f"{self.actions[0]} or {self.actions[1]}"

    def solve(self):
        return [self._better()]


class Board(TextEnv):
    """A world on a grid, shown as coordinates, as a grid of its own symbols, or as both.

    A board writes `_coordinates()` and `_grid()` (lists of lines), `meanings` of its symbols in
    order, and has the options `view` and `symbols`; with `relation_weights` also `_things()`: the
    player's cell and a list of (kind, cell), cells being (row, column).
    """

    meanings: tuple = ()

    def __init__(self, split="train", budget=None, **options):
        super().__init__(split, budget, **options)
        view, symbols, name = self.options["view"], self.options["symbols"], type(self).__name__
        if view not in ("coord", "grid", "grid_coord"):
            raise ValueError(f"option view of {name}: got {view!r}, expected coord, grid or "
                             f"grid_coord.")
        if not (len(symbols) == len(set(symbols)) == len(self.meanings) and symbols.isprintable()):
            raise ValueError(f"option symbols of {name}: got {symbols!r}, expected "
                             f"{len(self.meanings)} different symbols.")
        self.observation_space = text_space(symbols)

    def _legend(self):
        """The line that explains the symbols, where they are shown."""
        pairs = zip(self.options["symbols"], self.meanings)
        told = "Symbols: " + ", ".join(f"{s} {m}" for s, m in pairs) + "."
        return [] if self.options["view"] == "coord" else [told]

    def relations(self):
        if not self.relation_weights:
            return None
        player, things = self._things()
        return [(kind, *relation(player, cell)) for kind, cell in things]

    def render(self):
        """The board in its view."""
        coord, grid = "\n".join(self._coordinates()), "\n".join(self._grid())
        return {"coord": coord, "grid": grid,
                "grid_coord": f"{coord}\n{grid}"}[self.options["view"]]


class FrozenLake(Board):
    """Walk over ice from a start to a goal without entering a hole.

    Goal: reach the goal.
    Observation: coordinates (row, column) of start, goal, player and holes; a grid; or both.
    Actions: Left, Down, Right, Up; up to 2 a turn. Walking into the border leaves the player in
        place.
    Reward: 1 on entering the goal, otherwise 0.
    Ends when: the player enters the goal or a hole.
    Solver: value iteration over the actions left; without slip a shortest path.

    Options: `size`; `frozen`, the probability that a tile is ice and not a hole; `slip`, the
    probability that a step goes to one of the two perpendicular sides instead (0 as in RAGEN V2's
    run, 0.2 in its tag, 2/3 in V1); `view`, one of coord, grid, grid_coord; `symbols`, the six
    characters for player, ice, hole, goal, player in a hole, player on the goal. Start and goal are
    drawn at random, and a map is drawn again unless a path within the action budget joins them.

    Delta: RAGEN tells the model that the far corner is (5, 5) on a 4x4 board; here it is the
    board's own.

    The solver at seed 3 (`python -m minragen.envs frozenlake 3`):

        Start: (3, 1)
        Goal: (1, 2)
        Player: (3, 1)
        Holes: (3, 3)
        Turns left: 5, actions left: 10
        <answer> Right || Up </answer>
        Reward: 0
        Start: (3, 1)
        Goal: (1, 2)
        Player: (2, 2)
        Holes: (3, 3)
        Turns left: 4, actions left: 8
        <answer> Up </answer>
        Reward: 1
        Start: (3, 1)
        Goal: (1, 2)
        Player on the goal: (1, 2)
        Holes: (3, 3)
    """

    budget = Budget(max_turns=5, max_actions_per_turn=2, max_actions=10)
    actions = ("Left", "Down", "Right", "Up")
    habit = "Right"
    multi_action = True
    data_in_the_box = "generated maps"
    defaults = {"size": 4, "frozen": 0.9, "slip": 0.0, "view": "coord", "symbols": "P_OGX√"}
    meanings = ("player", "ice", "hole", "goal", "player in a hole", "player on the goal")
    relation_weights = {"goal": 0.7, "hole": 0.3}
    MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))

    def __init__(self, split="train", budget=None, **options):
        super().__init__(split, budget, **options)
        o = self.options
        if not (2 <= o["size"] <= 64 and 0 < o["frozen"] <= 1 and 0 <= o["slip"] <= 1):
            raise ValueError(f"bad options of FrozenLake: {o}; expected size of 2 to 64, "
                             f"0 < frozen <= 1 and 0 <= slip <= 1.")

    @property
    def instruction(self):
        o, far = self.options, self.options["size"] - 1
        lines = ["You walk on a frozen lake. Reach the goal and stay out of the holes.",
                 f"Positions are (row, column), from (0, 0) at the top left to ({far}, {far})."]
        if o["slip"]:
            lines.append(f"The ice is slippery: with probability {o['slip']:.3g} a step goes "
                         f"sideways.")
        return "\n".join([*lines, *self._legend()])

    def _reset(self, rng):
        n = self.options["size"]
        while True:
            self.holes = rng.random((n, n)) >= self.options["frozen"]
            start, goal = rng.integers(n, size=2), rng.integers(n, size=2)
            self.start, self.goal = (int(start[0]), int(start[1])), (int(goal[0]), int(goal[1]))
            self.holes[self.start] = self.holes[self.goal] = False
            apart = abs(start - goal).sum()
            if 0 < apart <= self.budget.max_actions and self._distance() <= self.budget.max_actions:
                break
        self.player = self.start
        self._policy = None

    def _distance(self):
        """Length of the shortest path from start to goal, infinite if there is none."""
        frontier, seen, steps = [self.start], {self.start}, 0
        while frontier:
            if self.goal in frontier:
                return steps
            near = {self._move(cell, m) for cell in frontier for m in self.MOVES}
            frontier = [cell for cell in near if cell not in seen and not self.holes[cell]]
            seen.update(frontier)
            steps += 1
        return float("inf")

    def _move(self, cell, move):
        top = self.options["size"] - 1
        return min(max(cell[0] + move[0], 0), top), min(max(cell[1] + move[1], 0), top)

    def _act(self, action):
        a, slip = self.actions.index(action), self.options["slip"]
        if slip:  # one draw per action: the two sides share the slip probability
            u = self.dynamics.random()
            a = (a + (0 if u >= slip else -1 if u < slip / 2 else 1)) % 4
        before, self.player = self.player, self._move(self.player, self.MOVES[a])
        won, lost = self.player == self.goal, bool(self.holes[self.player])
        return Outcome(float(won), terminated=won or lost, success=won,
                       effective=self.player != before)

    def _grid(self):
        n = range(self.options["size"])
        return ["".join(self._symbol((r, c)) for c in n) for r in n]

    def _coordinates(self):
        place = ("Player on the goal" if self.player == self.goal else
                 "Player in a hole" if self.holes[self.player] else "Player")
        lines = [f"Start: {self.start}", f"Goal: {self.goal}", f"{place}: {self.player}"]
        holes = [f"({r}, {c})" for r, c in np.argwhere(self.holes)]
        return lines + ([f"Holes: {' '.join(holes)}"] if holes else [])

    def _things(self):
        holes = [("hole", (int(r), int(c))) for r, c in np.argwhere(self.holes)]
        return self.player, [("goal", self.goal), *holes]

    def _symbol(self, cell):
        player, ice, hole, goal, drowned, arrived = self.options["symbols"]
        if cell == self.player:
            return arrived if cell == self.goal else drowned if self.holes[cell] else player
        return hole if self.holes[cell] else goal if cell == self.goal else ice

    def instance(self):
        # Not the rendering: the same map must have the same split in every view and symbol set.
        return f"{self.holes.astype(int).tolist()} {self.start} {self.goal}"

    def note(self):
        return f"player {self.player} goal {self.goal}"

    def solve(self):
        """Without slip this is a shortest path; with slip, the best plan while every step goes as
        intended."""
        if self._policy is None:
            self._policy = self._value_iteration()
        plan, cell = [], self.player
        while cell != self.goal and len(plan) < self.actions_left:
            a = int(self._policy[self.actions_left - len(plan)][cell])
            plan.append(self.actions[a])
            cell = self._move(cell, self.MOVES[a])
        return self._in_turns(plan)

    def _value_iteration(self):
        """policy[k][cell]: the best action with k actions left.

        V_k(s) = max_a sum_s' p(s'|s,a) (1[s' = goal] + 0.999 V_{k-1}(s'));
        the 0.999 prefers short ways.
        """
        n, slip = self.options["size"], self.options["slip"]
        rows, cols = np.indices((n, n))
        arrive = []  # values[arrive[a]]: per cell, the value of the cell that direction a leads to
        for dr, dc in self.MOVES:
            arrive.append((np.clip(rows + dr, 0, n - 1), np.clip(cols + dc, 0, n - 1)))
        values, policy = np.zeros((n, n)), {}
        for k in range(1, self.budget.max_actions + 1):
            worth = np.where(self.holes, 0.0, 0.999 * values)
            worth[self.goal] = 1.0  # and nothing more: the episode ends there
            step = np.stack([worth[index] for index in arrive])  # (4, n, n)
            q = ((1 - slip) * step
                 + slip / 2 * (np.roll(step, 1, axis=0) + np.roll(step, -1, axis=0)))
            policy[k], values = q.argmax(axis=0), q.max(axis=0)
        return policy


# ==================================================================================================
# Looking at one


def transcript(name, seed=0, split="train", **options):
    """The solver's episode as text: what the model is told, what it answers, what comes back."""
    env = make(name, split, **options)
    observation, _ = env.reset(seed=seed)
    lines, over = [env.system_prompt, "", observation], False
    while not over:
        answer = env.solve()[0]
        observation, _, terminated, truncated, _ = env.step(answer)
        lines += [f"<answer> {answer} </answer>", observation]
        over = terminated or truncated
    return "\n".join(lines)


if __name__ == "__main__":
    # A user's class derives from this module's TextEnv, not from __main__'s.
    from minragen.envs import transcript

    arguments = [*sys.argv[1:], *("frozenlake", "0")[len(sys.argv) - 1:]]
    if len(arguments) != 2 or not arguments[1].isdecimal():
        sys.exit("usage: python -m minragen.envs [ENV [SEED]]")
    try:
        print(transcript(arguments[0], int(arguments[1])))
    except (ValueError, ImportError, NotImplementedError) as problem:
        sys.exit(f"error: {problem}")
