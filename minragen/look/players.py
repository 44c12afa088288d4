"""The scripted players, measured beside a model on the same instances.

The random policy shows what chance earns, the solver what the budget allows. Two shallow baselines
show what is possible without learning the task: the environment's own `shallow_answer`, and the
nearest of the solver's turns on DEMONSTRATIONS training instances.
"""

import functools
import math
import re
from collections import defaultdict

import numpy as np

from minragen.look.faults import failure_of
from minragen.more.converse import converse
from minragen.trajectory import Reply, Trajectory

DEMONSTRATIONS = 256  # episodes of the solver that the nearest demonstration is chosen from


def players(training):
    """{name: function (env, texts, rng) -> answer} of the baselines. `texts` is what a model has
    seen: system prompt, observation, answer, observation, ...; `training` is EnvGroups."""
    return {"random policy": lambda env, texts, rng: env.random_answer(rng),
            "shallow player": lambda env, texts, rng: env.shallow_answer(texts),
            "nearest demonstration": nearest_demonstration(training),
            "solver": lambda env, texts, rng: env.solve()[0]}


def scripted(groups, player):
    """Play one episode in every row with a scripted player. Returns the Trajectories."""
    rngs = [np.random.default_rng([0, row]) for row in range(len(groups))]
    trajectories = [Trajectory.begin(groups, *row) for row in enumerate(groups.reset(0))]
    for t, env in zip(trajectories, groups.envs):
        t.system = env.system_prompt

    def answer(t):
        texts = [*(message["content"] for message in t.messages()), t.observation]
        try:
            said = str.__str__(player(groups.envs[t.env_index], texts, rngs[t.env_index]))
        # A user's environment may have no solver.
        except (NotImplementedError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the environment failed
            t.fail(failure_of(error))
            return None
        return said, Reply(answer=said)

    converse(groups.step, trajectories, answer)
    return trajectories


def nearest_demonstration(training):
    """A player that answers as the solver did in the most similar conversation of training.

        similarity = sum of idf over the shared features / sqrt(features of the demonstration)

    The features of a conversation are its words, its signs, and pairs of adjacent ones.
    """
    @functools.cache
    def demonstrations():
        """Of each turn of the solver the answer and the norm; {feature: the turns that have it}."""
        answers, norms, turns_with = [], [], defaultdict(list)

        def solve(env, texts, rng):
            answers.append(env.solve()[0])
            norms.append(math.sqrt(len(seen := features(texts))))
            for feature in seen:
                turns_with[feature].append(len(answers) - 1)
            return answers[-1]

        scripted(training, solve)
        return answers, norms, {feature: np.array(turns) for feature, turns in turns_with.items()}

    def answer(env, texts, rng):
        answers, norms, turns_with = demonstrations()
        scores = np.zeros(len(answers))
        for feature in features(texts) & turns_with.keys():
            where = turns_with[feature]
            scores[where] += math.log(len(scores) / len(where))
        return answers[np.argmax(scores / norms)]

    return answer


def features(texts):
    words = re.findall(r"\w+|[^\w\s]", " ".join(texts))
    return {*words, *zip(words, words[1:])}
