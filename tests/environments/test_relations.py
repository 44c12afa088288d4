"""Descriptions of a state: how they are read, how they are scored, and the state reward."""

import functools
import itertools
import random
import time
from types import SimpleNamespace

import pytest
from test_fuzz import frame_of
from toys import prompt_length, puppet, replies, tiny

from minragen.environments.board import read_relations, relation, relation_f1
from minragen.envs import EnvGroups, make
from minragen.more.described import DescribedTurn
from minragen.rollout import Rules, collect
from minragen.run.groups import PatientGroups
from minragen.trajectory import Reply

PLACES = [*itertools.product(("above", "same row", "below"), ("left", "same column", "right"))]
FORMAT = "grounding_worldmodeling"


class TestLanguage:
    def test_a_place_is_named_as_seen_from_the_player(self):
        cells = [(r, c) for r in (0, 1, 3) for c in (0, 1, 3)]
        assert [relation((1, 1), cell) for cell in cells] == PLACES

    def test_everything_is_named_also_a_box_on_its_target(self):
        lake, room = make("frozenlake"), make("sokoban", boxes=2, cols=7)
        for env in (lake, room):
            env.reset(seed=0)
        lake.player, lake.goal = (1, 1), (3, 2)
        lake.holes = [[0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
        assert lake.describe() == "goal below right; hole above right; hole same row left"
        room.player, room.boxes, room.targets = 16, frozenset({9, 17}), frozenset({16, 17})
        assert room.describe() == (
            "box above same column; box same row right; "
            "target same row same column; target same row right")

    def test_what_is_written_is_read_again(self, monkeypatch):
        env = make("frozenlake")
        for claims in ([(kind, *place) for kind in ("goal", "hole") for place in PLACES], []):
            monkeypatch.setattr(env, "relations", lambda claims=claims: claims)
            assert read_relations(env.describe()) == claims

    def test_only_clauses_that_are_exactly_a_claim_count(self):
        """Case and blanks do not matter; other clauses are ignored."""
        for text in (" Goal  BELOW\tright. ", "goal below right\nhole left",
                     "none; goal below right;; goal right below; the hole is above left",
                     "goal below right; hole below, right; holebelowright; hole below right left"):
            assert read_relations(text) == [("goal", "below", "right")], text

    def test_the_time_to_read_and_score_a_text_is_linear_in_its_length(self):
        truth = [("goal", "below", "right"), ("hole", "above", "left")] * 50
        assert relation_f1(truth, truth, {"goal": 0.7, "hole": 0.3}) == 1  # imports scipy.optimize
        for piece in ("goal below right;", ";", "goal below ", "İ\u2003"):
            text, began = piece * (300_000 // len(piece)), time.process_time()
            assert relation_f1(read_relations(text), truth, {"goal": 0.7, "hole": 0.3}) < 1
            assert time.process_time() - began < 1, piece

    def test_the_language_is_explained_where_a_format_describes(self):
        for name, describes in (("grounding", True), ("worldmodeling", True), ("no_think", False)):
            message = frame_of(name).system_message(make("frozenlake"))
            assert ("goal below right; hole same row left" in message) == describes


class TestF1:
    def test_it_gives_the_numbers_worked_out_by_hand(self):
        everywhere = "; ".join(f"goal {v} {h}" for v, h in PLACES)
        for name, said, true, f1 in (
                ("frozenlake", "goal below left", "goal below right", 0.5),  # half of the place
                ("sokoban", "box below left", "box below right", 0),  # here, half is nothing
                # The goal: 1. Holes: one of two, 2 * 1 / (1 + 2). In all 0.7 + 0.3 * 2/3.
                ("frozenlake", "goal below right; hole above left",
                 "goal below right; hole above left; hole below left", 0.9),
                # A hole that is not there: 0.7 * 1 + 0.3 * 0.
                ("frozenlake", "goal below right; hole above left", "goal below right", 0.7),
                ("frozenlake", everywhere, "goal above left", 0.2)):  # 2 * 1 / (9 + 1)
            env = make(name)
            env.relations = functools.partial(read_relations, true)
            assert env.score_description(said) == pytest.approx(f1), (name, said)

    def test_the_matching_is_as_good_as_the_best_of_all_permutations(self):
        rng = random.Random(0)
        for near in [0.0, 0.3, 0.5] * 50:
            claimed, true = (rng.choices(PLACES, k=rng.randrange(6)) for _ in range(2))
            short, long = sorted((claimed, true), key=len)
            worth = 1, near, 0  # by the number of relations that differ
            best = max(sum(worth[(a[0] != b[0]) + (a[1] != b[1])] for a, b in zip(short, order))
                       for order in itertools.permutations(long, len(short)))
            expected = 2 * best / (len(short) + len(long)) if long else 1.0
            got = relation_f1([("hole", *p) for p in claimed], [("hole", *p) for p in true],
                              {"hole": 0.3}, near)
            assert got == pytest.approx(expected), (claimed, true, near)


class TestStateReward:
    """In the lake of seed 0 the goal is two steps above the player."""

    AHEAD, HERE = "goal above same column", "goal same row same column"
    PARTS, RULES = ("observation", "reasoning", "prediction", "answer"), Rules(max_context=4000)

    def test_a_description_is_rewarded_if_format_and_action_are_valid(self):
        said = Reply("r", "a", True)

        def rewarded(reply=said, f1=1.0, valid=1.0, weights=(0.5,)):
            env = SimpleNamespace(score_description=lambda text: f1)
            turn = DescribedTurn(self.PARTS, *weights, turn=lambda env, reply: (
                "", 0.125, False, False, {"valid": valid}))
            return turn(env, reply)[1::3]

        right = {"valid": 1.0, "grounding": 1.0, "worldmodeling": 1.0, "env_return": 0.125}
        assert rewarded() == (1.125, right)
        assert rewarded(valid=0.0) == (0.125, right | {"valid": 0.0})
        assert rewarded(weights=()) == (0.125, right)
        # A malformed reply describes nothing, not even a state without objects.
        assert rewarded(Reply()) == (0.125, right | {"grounding": 0.0, "worldmodeling": 0.0})
        assert rewarded(f1=None) == (0.125, {"valid": 1.0})

    def test_without_descriptions_or_without_places_nothing_is_scored(self):
        for env, frame in (("frozenlake", tiny()[1]), ("bandit", frame_of(FORMAT))):
            policy, _ = puppet(frame.tokenizer)
            groups = EnvGroups(env, 1, 1)
            groups.turn = DescribedTurn(frame.parts, 0.5)
            (t,) = collect(policy, frame, groups, 0, self.RULES)
            assert not {"grounding", "worldmodeling", "env_return"} & t.metrics.keys(), env

    def test_each_is_compared_with_the_state_on_its_side_of_the_answer(self, monkeypatch):
        """Played by a puppet. F1 is averaged over turns; a turn that raises has no reward."""
        groups = PatientGroups("frozenlake", 1, 1, budgets={"max_turns": 2})
        frame = frame_of(FORMAT)
        first, second = (frame.encode(frame.write({
            "observation": seen, "reasoning": "", "prediction": then, "answer": "Up"}))
            for seen, then in ((self.AHEAD, self.AHEAD), (self.HERE, self.HERE)))
        (policy, _), start = puppet(frame.tokenizer), prompt_length(frame, groups)
        policy.model.script = dict(enumerate(first, start))
        start += len(first) + len(frame.next_prompt_ids(
            first[-1], groups.step([0], replies(["Up"]))[0][0]))
        policy.model.script |= dict(enumerate(second, start))
        groups.turn = DescribedTurn(self.PARTS, 0.5)
        t = collect(policy, frame, groups, 0, self.RULES)[0]
        assert t.turn_rewards == [1.0, 1.75]
        metrics = [t.metrics[name] for name in ("grounding", "worldmodeling", "env_return")]
        assert metrics == [0.75, 1.0, 1.0]
        monkeypatch.setattr(groups.envs[0], "_act", None)  # cannot be called
        assert collect(policy, frame, groups, 0, self.RULES)[0].turn_rewards == [0.0]
