"""What a model says of a state: how it is read, what it is worth, and when it is paid."""

import functools
import itertools
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import Puppet

from minragen import train as trainer
from minragen.envs import (
    HORIZONTAL,
    REGISTRY,
    VERTICAL,
    EnvGroups,
    Outcome,
    TextEnv,
    make,
    read_relations,
    relation,
    relation_f1,
    relations_text,
)
from minragen.models import ChatFrame, Policy, tiny_tokenizer
from minragen.rollout import Sampling, StateReward, StopReason, collect

LAKE = {"goal": 0.7, "hole": 0.3}
ROOM = {"target": 0.5, "box": 0.5}
PLACES = list(itertools.product(VERTICAL, HORIZONTAL))


class TestRelations:
    def test_a_place_is_named_by_where_it_is_from_the_player(self):
        assert relation((1, 1), (2, 0)) == ("below", "left")
        assert relation((1, 1), (0, 1)) == ("above", "same column")
        assert relation((1, 1), (1, 3)) == ("same row", "right")

    def test_a_lake_names_its_goal_and_every_hole(self):
        env = make("frozenlake")
        env.reset(seed=0)
        env.player, env.goal, env.holes = (1, 1), (3, 2), np.zeros((4, 4), dtype=bool)
        env.holes[1, 0] = env.holes[0, 3] = True
        assert relations_text(env.relations()) == (
            "goal below right; hole above right; hole same row left")

    def test_a_room_names_all_boxes_and_targets_at_home_or_not(self):
        env = make("sokoban", boxes=2)
        env.reset(seed=0)
        env.player, env.boxes, env.targets = 14, frozenset({8, 15}), frozenset({15, 14})
        assert relations_text(env.relations()) == (
            "box above same column; box same row right; "
            "target same row same column; target same row right")

    @pytest.mark.parametrize("env", sorted(REGISTRY))
    def test_an_environment_has_relations_of_the_kinds_that_it_weighs_or_none(self, env):
        env = make(env)
        env.reset(seed=0)
        kinds = None if env.relations() is None else {kind for kind, *_ in env.relations()}
        assert kinds is None if not env.relation_weights else kinds <= env.relation_weights.keys()
        assert 0 <= env.relation_near <= 0.5


class TestLanguage:
    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.tuples(st.sampled_from(["goal", "hole"]), st.sampled_from(VERTICAL),
                              st.sampled_from(HORIZONTAL))))
    def test_what_is_written_is_read_again(self, relations):
        assert read_relations(relations_text(relations)) == relations

    @pytest.mark.parametrize("text", [
        "goal below right", " Goal  BELOW\tright. ", "I look around; goal below right; fine",
        "goal below right\nhole left", "none; goal below right;;", "goal below right; goal below"])
    def test_case_blanks_and_clauses_of_another_language_do_not_matter(self, text):
        assert read_relations(text) == [("goal", "below", "right")]

    @pytest.mark.parametrize("text", [
        "", "none", "the goal is below right", "goal right below", "goal below, right",
        "goal below or above right", "goal below right left", "goalbelowright", "below right"])
    def test_anything_else_claims_nothing(self, text):
        assert read_relations(text) == []

    @pytest.mark.parametrize("piece", ["goal below right;", ";", "goal below ", " ", "İ\u2003"])
    def test_a_megabyte_of_anything_is_read_and_graded_at_once(self, piece):
        text, began = piece * (10**6 // len(piece)), time.process_time()
        truth = [("goal", "below", "right"), ("hole", "above", "left")] * 50
        assert 0 <= relation_f1(read_relations(text), truth, LAKE) < 1
        assert time.process_time() - began < 3


class TestF1:
    @pytest.mark.parametrize("claimed, true, expected", [
        # VAGEN's FrozenLake: goal .7, hole .3, half a pair for half of the place.
        ("goal below right", "goal below right", 1.0),
        ("goal below left", "goal below right", 0.5),
        ("goal above left", "goal below right", 0.0),
        ("", "goal below right", 0.0),
        ("", "", 1.0),
        # The goal: 1. Holes: one of two, so 2 * 1 / (1 + 2) = 2/3. 0.7 + 0.3 * 2/3 = 0.9.
        ("goal below right; hole above left",
         "goal below right; hole above left; hole below left", 0.9),
        # A hole that is not there: 0.7 * 1 + 0.3 * 0.
        ("goal below right; hole above left", "goal below right", 0.7),
        # Two goals: 2 * 1 / (2 + 1).
        ("goal below right; goal above left", "goal below right", 2 / 3),
        # The exact pair first, then nothing is left for the other: 2 * 1 / (2 + 2).
        ("hole below right; hole above left",
         "hole below right; hole same row same column", 0.5),
        # Both pairs are half right, either way round: 2 * (0.5 + 0.5) / (2 + 2).
        ("hole below right; hole above left", "hole below left; hole above right", 0.5),
        ("box below right", "goal below right", 0.0),  # no kind of this world
    ])
    def test_worked_numbers_of_the_lake(self, claimed, true, expected):
        claimed, true = read_relations(claimed), read_relations(true)
        assert relation_f1(claimed, true, LAKE) == pytest.approx(expected)

    @pytest.mark.parametrize("claimed, expected", [
        ("box below right; target above left", 1.0),
        ("box below right", 0.5),
        ("box below left; target above left", 0.5),  # half of a place is nothing
        ("box below right; box above left; target above left", 0.5 + 0.5 * 2 / 3),
    ])
    def test_worked_numbers_of_the_room(self, claimed, expected):
        true = read_relations("box below right; target above left")
        assert relation_f1(read_relations(claimed), true, ROOM, near=0.0) == pytest.approx(expected)

    def test_claiming_all_nine_places_has_a_fifth(self):
        everywhere = [("goal", *place) for place in PLACES]
        assert relation_f1(everywhere, [("goal", "above", "left")], LAKE) == pytest.approx(0.2)

    @settings(max_examples=80, deadline=None)
    @given(st.lists(st.sampled_from(PLACES), max_size=5), st.lists(st.sampled_from(PLACES),
                                                                   max_size=5),
           st.sampled_from([0.0, 0.3, 0.5]))
    def test_the_matching_is_as_good_as_the_best_of_all_permutations(self, claimed, true, near):
        short, long = sorted((claimed, true), key=len)
        best = max(sum((1, near, 0)[(a[0] != b[0]) + (a[1] != b[1])] for a, b in zip(short, order))
                   for order in itertools.permutations(long, len(short)))
        expected = 2 * best / (len(short) + len(long)) if long else 1.0
        got = relation_f1([("hole", *p) for p in claimed], [("hole", *p) for p in true],
                          {"hole": 0.3}, near)
        assert got == pytest.approx(expected)

    def test_it_is_symmetric_and_between_zero_and_one(self):
        rng = random.Random(0)
        for _ in range(200):
            a, b = ([(rng.choice(["goal", "hole"]), *rng.choice(PLACES))
                     for _ in range(rng.randrange(9))] for _ in range(2))
            assert 0 <= relation_f1(a, b, LAKE) <= 1
            assert relation_f1(a, b, LAKE) == pytest.approx(relation_f1(b, a, LAKE))


FORMAT, HALF = "grounding_worldmodeling", StateReward(0.5, 0.25)


def reply(observation, prediction, answer):
    return (f" {observation}</observation><reasoning> r</reasoning><prediction> {prediction}"
            f"</prediction></think><answer> {answer}</answer>")


class Narrow(TextEnv):
    """A corridor with a goal to the right; the action Crash raises."""

    instruction, actions = "Walk.", ("Right", "Crash")
    relation_weights = {"goal": 1.0}

    def _reset(self, rng):
        self.place = 0

    def instance_split(self):
        return self.split

    def relations(self):
        return [("goal", *relation((0, self.place), (0, 1)))]

    def render(self):
        return f"Place {self.place}"

    def texts(self, seed):
        yield " goal same row right same column r Right Fly Crash"

    def _act(self, action):
        if action == "Crash":
            raise OSError("the outside world is gone")
        self.place += 1
        return Outcome(0.125)


@functools.cache
def puppet(response_format):
    tokenizer = tiny_tokenizer([Narrow()], response_format)
    return (Policy("puppet", Puppet(len(tokenizer)), tokenizer),
            ChatFrame(tokenizer, response_format))


class TestPay:
    """A puppet says one reply in a corridor: the goal is at first to the right, then here."""

    BEFORE, AFTER = "goal same row right", "goal same row same column"

    def said(self, text, state_reward=HALF, response_format=FORMAT):
        groups = EnvGroups("test_relations:Narrow", 1, 1, budgets=dict(max_turns=1, max_actions=1))
        policy, frame = puppet(response_format)
        start = len(frame.open(groups.envs[0].system_prompt, groups.reset(0)[0]))
        policy.model.script = dict(enumerate(frame.encode(text), start))
        return collect(policy, frame, groups, 0, Sampling(), max_new_tokens=80, max_context=600,
                       state_reward=state_reward)[0]

    def test_a_true_observation_and_a_true_prediction_are_paid(self):
        t = self.said(reply(self.BEFORE, self.AFTER, "Right"))
        assert t.turn_rewards == [0.125 + 0.5 + 0.25] == [t.turns[0].reward]
        assert (t.metrics["grounding"], t.metrics["worldmodeling"]) == (1.0, 1.0)

    def test_each_is_compared_with_the_state_on_its_side_of_the_answer(self):
        t = self.said(reply(self.AFTER, self.BEFORE, "Right"))
        # The row is right in both, the column in neither: 0.5.
        assert t.turn_rewards == [0.125 + 0.5 * (0.5 + 0.25)]
        assert (t.metrics["grounding"], t.metrics["worldmodeling"]) == (0.5, 0.5)

    def test_the_environments_own_return_stays_visible(self):
        t = self.said(reply(self.BEFORE, self.AFTER, "Right"))
        assert t.metrics["env_return"] == 0.125 != t.episode_return

    @pytest.mark.parametrize("text, described", [
        (reply("goal same row right", "goal same row right", "Fly"), 1.0),  # no action here
        (" goal same row right</observation><reasoning> r</reasoning></think>"
         "<answer> Right</answer>", 0.0)])
    def test_nothing_is_paid_where_form_or_action_is_wrong(self, text, described):
        t = self.said(text)
        assert t.turn_rewards == [-0.1] and t.metrics["env_return"] == -0.1
        assert t.metrics["grounding"] == t.metrics["worldmodeling"] == described

    def test_an_environment_that_raises_pays_nothing_for_the_turn(self):
        t = self.said(reply(self.BEFORE, self.BEFORE, "Crash"))
        assert t.stop is StopReason.ENV_ERROR and t.turn_rewards == [0.0]

    def test_without_a_weight_it_is_measured_and_not_paid(self):
        t = self.said(reply(self.BEFORE, self.AFTER, "Right"), StateReward())
        assert t.turn_rewards == [0.125] and t.metrics["grounding"] == 1.0

    def test_a_form_without_descriptions_has_neither_metric_nor_pay(self):
        t = self.said(f" {self.BEFORE}</think><answer> Right</answer>",
                      response_format="free_think")
        assert t.turn_rewards == [0.125]
        assert not {"grounding", "worldmodeling", "env_return"} & t.metrics.keys()

    def test_f1_is_averaged_over_turns_and_described_per_environment(self):
        groups = EnvGroups("frozenlake", 2, 2)
        policy, frame = puppet("grounding")
        policy.model.script = {}
        played = collect(policy, frame, groups, 0, Sampling(), max_new_tokens=2, max_context=4000)
        assert {t.metrics["grounding"] for t in played} == {0.0}  # never in form
        assert trainer.describe(played)["grounding"] == 0.0
        assert "worldmodeling" not in trainer.describe(played)
