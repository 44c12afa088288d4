"""Layers are wrappers of an environment: each changes one thing and passes all else through.

    make train ENV=sokoban ARGS="--layer action_noise,probability=0.2"

A layer of your own: docs/add-an-environment.md.
"""

import gymnasium

from minragen.envs import Outcome, TextEnv
from minragen.support.options import check_options, in_module, nearest, parse_options


class Layer(gymnasium.Wrapper):
    """Around `self.env`, an environment or another layer. A subclass writes what it changes:

        rule              str or property: a line added to the system message
        _act(action)      one action of an answer; self.env._act(action) -> Outcome or None
        render_text()     the text that the model sees; self.env.render_text()
        image()           what a vision-language model sees; self.env.image()
        reset, step       a whole turn, as Gymnasium's wrappers do
        defaults, ranges  of its options, as in TextEnv; self.options has their values

    Whatever it does not write is the environment's. The instance, and so the split, never depends
    on a layer. `self.luck` is its random generator, one for each layer and each member of a group;
    the environment's `dynamics` draws the same numbers with or without a layer.

    raises: ValueError for unknown options, or for an environment that writes its own step()
    """

    env = None  # NOTE: without it, a name looked up before __init__ recurses for ever
    rule = ""
    defaults: dict = {}
    ranges: dict = {}

    def __init__(self, env, /, **options):
        super().__init__(env)
        if type(env.unwrapped).step is not TextEnv.step:
            raise ValueError(f"no layer fits around {type(env.unwrapped).__name__}: it writes its "
                             f"own step(). For a server: minragen serve --layer.")
        self.options = check_options(type(self).__name__, self.defaults, options, self.ranges)
        env.unwrapped.outermost_layer = self

    def __getattr__(self, name):
        return getattr(self.env, name)

    @property
    def system_prompt(self):
        return "\n".join(filter(None, [self.env.system_prompt, self.rule]))

    def reset(self, *, seed=None, options=None):
        first = self.env.reset(seed=seed, options=options)
        self.luck, = self.dynamics.spawn(1)  # draws nothing from it
        return first


class ActionNoise(Layer):
    """With `probability` an action is replaced by another one, drawn uniformly. Where actions are
    not just names, as in search[query], it has no effect instead, but counts as a valid action,
    whatever it was.

    The metric `replaced` counts these actions. The solver plans as if there were no noise.
    """

    defaults = {"probability": 0.1}
    ranges = {"probability": (0, 1)}

    @property
    def rule(self):
        what = "replaced by another one" if self.names() else "lost"
        return f"With probability {self.options['probability']:.3g} an action is {what}."

    def names(self):
        """The actions that can take another one's place."""
        return [name for name in self.actions if self._match(name) == name]

    def _act(self, action):
        others = [name for name in self.names() if name != action]
        replaced = self.luck.random() < self.options["probability"]
        if replaced and others:
            action = others[self.luck.integers(len(others))]
        outcome = (Outcome(0.0, effective=False) if replaced and not others else
                   self.env._act(action))
        if outcome:
            found = outcome.metrics or {}  # perhaps of an inner ActionNoise
            outcome = outcome._replace(
                metrics={**found, "replaced": found.get("replaced", 0.0) + replaced})
        return outcome


class RandomReward(Layer):
    """An episode pays 1 at its end with `probability`, otherwise 0, whatever was done in it. One
    that fills the model's context has no end and pays 0.

    A control: success that rises under it does not come from the task's rewards (Shao et al. 2025,
    "Spurious Rewards"). The model sees the same texts as without it.
    """

    defaults = {"probability": 0.5}
    ranges = {"probability": (0, 1)}

    def step(self, answer):
        observation, _, terminated, truncated, info = self.env.step(answer)
        paid = (terminated or truncated) and self.luck.random() < self.options["probability"]
        return observation, float(paid), terminated, truncated, info


LAYERS = {"action_noise": ActionNoise, "random_reward": RandomReward}


def wrapped(env, layers):
    """The environment inside of its layers, the last one outermost.

    layers: texts such as `action_noise,probability=0.2` or `module:Class`
    """
    for text in layers:
        _, *options = text.split(",")
        env = layer_class(text)(env, **parse_options(options, "option of a layer"))
    return env


def layer_class(text):
    """The class that `action_noise,probability=0.2` names. Raises ValueError."""
    name = text.partition(",")[0]
    if name in LAYERS:
        return LAYERS[name]
    if ":" not in name:
        raise ValueError(nearest("layer", name, [*LAYERS]) + " Or give package.module:Class.")
    found = in_module("layer", name, "Class")
    if not (isinstance(found, type) and issubclass(found, Layer)):
        raise ValueError(f"layer {name!r}: there is no such subclass of Layer.")
    return found
