"""ECHO: which tokens of an observation are predicted, and that to predict them is learnt."""

import pytest
from conftest import message
from test_chat import FAMILIES, family
from toys import tiny

from minragen.config import preset
from minragen.envs import Observation
from minragen.more.echo import EchoFrame
from minragen.rollout import collect
from minragen.run.groups import env_groups
from minragen.train import rules_of
from minragen.trajectory import Trajectory


@pytest.fixture(scope="module")
def played():
    """Two groups of FrozenLake, played by the untrained model, and their frame."""
    config = preset("frozenlake")
    policy, _ = tiny()
    frame = EchoFrame(policy.tokenizer, max_new_tokens=config.max_new_tokens)
    groups = env_groups(config, "train", 2, 2)
    return collect(policy, frame, groups, 0, rules_of(config)), frame


class TestPredicted:
    def test_they_are_the_state_after_each_reply_and_not_reward_budget_or_template(self, played):
        trajectories, frame = played
        for t in trajectories:
            (row,) = t.sequences
            shown = frame.tokenizer.decode([row.tokens[i] for i in row.predicted])
            assert len(t.turns) > 2
            assert shown == "".join(turn.observation.state for turn in t.turns[1:])
            for word in ("Reward", "Turns", "valid", "<think>"):
                assert word not in shown and word in frame.tokenizer.decode(row.tokens)
            assert not any(row.response_mask[i] for i in row.predicted)

    @pytest.mark.parametrize("name", FAMILIES)
    def test_other_tokenizers_split_the_state_as_exactly_as_their_tokens_allow(self, name):
        """A token that begins before the state or ends behind it is left out."""
        tokenizer, end = family(name)
        frame = EchoFrame(tokenizer, model_eos=end)
        t = Trajectory("x", 0, 0, 0)
        state = "player: (0, 2)\ngoal: (3, 3)"
        t.observation = Observation(f"Reward: 0\n{state}\nTurns left: 3", state=state)
        t.add_prompt(frame.first_prompt_ids("rules", "begin"))
        t.add_reply(frame.encode("</think><answer>Up</answer>"), [0.0] * 200, 0)
        assert frame.append_next_prompt(t, rules_of(preset("frozenlake", model="x")))
        ids = [t.tokens[i] for i in t.sequences[0].predicted]
        assert tokenizer.decode(ids).strip() == state
        whole = frame.encode(state)  # nothing follows it
        assert [*frame.places(whole, state, state)] == [*range(len(whole))]

    @pytest.mark.parametrize("observation, state", [
        ("Reward: 0\nTurns left: 3", "3"), ("Reward: 0\nA board", "Another board"),
        ("Reward: 0\nNothing", "")])
    def test_a_state_that_is_not_shown_is_not_predicted(self, played, observation, state):
        frame = played[1]
        assert list(frame.places(frame.next_prompt_ids(5, observation), observation, state)) == []


class TestEcho:
    def test_where_there_is_nothing_to_predict_it_is_refused_with_a_sentence(self):
        for options, said in (
                ("--env bandit --echo-coef 1", "Episodes of one turn have no observation"),
                ("--env frozenlake --model tiny-vlm --echo-coef 1", "predicts text, and frozen"),
                ("--env frozenlake --model tiny-vlm --algo gigpo", "shows no state as text")):
            assert said in message(*options.split(), "--run", "x"), options
