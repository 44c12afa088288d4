"""Rows that move on by themselves: the same trajectories as of rows in the same turn."""

import copy
import dataclasses
import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_families import family
from test_step import assert_equal, configured, real  # noqa: F401  a fixture
from toys import Faulty, Lottery, tiny

from minragen import cache, rollout
from minragen.chat import ChatFrame
from minragen.envs import EnvGroups
from minragen.fast import flash, graphs, llama, sampling
from minragen.models import Policy
from minragen.more.described import DescribedTurn
from minragen.more.windows import WindowedFrame
from minragen.rollout import Rules
from minragen.run import groups as run_groups
from minragen.run.groups import PatientGroups, collect
from minragen.trajectory import Reply

WORD = Reply(answer="word")


class Slow(Lottery):
    """A lottery that does not answer at once, and grades descriptions."""

    parallel = True

    def score_description(self, text):
        return len(text) % 4 / 3


class Endless(Slow):
    """A slow lottery that goes on for all its turns."""

    def step(self, answer):
        shown, reward, _, _, info = super().step(answer)
        return shown, reward, False, self.turns_left == 0, info


class SlowAndFaulty(Faulty):
    """Its threads return in random order."""

    parallel = True

    def step(self, answer):
        threading.Event().wait(random.random() / 300)
        return super().step(answer)


class Delayed(PatientGroups):
    """Each step takes as many calls of `receive` as `delays` says; one that waits skips time."""

    def __init__(self, *given, delays=None, **named):
        super().__init__(*given, **named)
        self.delays, self.later, self.sent = delays or itertools.repeat(0), {}, []

    def send(self, rows, replies):
        self.sent.append([*rows])
        self.later |= {row: [next(self.delays), result]
                       for row, result in zip(rows, self.step(rows, replies))}

    def receive(self, wait=True):
        passed = max(1, min(delay for delay, _ in self.later.values())) if wait else 1
        for late in self.later.values():
            late[0] -= passed
        answered = [row for row, (delay, _) in self.later.items() if delay <= 0]
        random.Random(len(answered)).shuffle(answered)
        return {row: self.later.pop(row)[1] for row in answered}


def said(trajectories):
    """Everything but when it happened, and logprobs, which may differ by rounding."""
    return [dataclasses.replace(t, fault=None, turns=[
        dataclasses.replace(turn, times=()) for turn in t.turns], sequences=[
        dataclasses.replace(s, sample_logprobs=[]) for s in t.sequences]) for t in trajectories]


def logprobs(trajectories):
    return [x for t in trajectories for s in t.sequences for x in s.sample_logprobs]


def policy_and_frame(context="full", response_format="free_think"):
    """Replies of many lengths."""
    policy = copy.copy(tiny()[0])
    kind = ChatFrame if context == "full" else partial(WindowedFrame, context=context, window=2)
    frame = kind(policy.tokenizer, response_format)
    policy.model = copy.deepcopy(policy.model).double()
    frame.end_ids = set(range(0, len(frame.tokenizer), 9))
    return policy, frame


def replayed(*given):
    """`graphs.last_hidden` on a CPU, where a captured function is called again instead."""
    with mock.patch.multiple(graphs, DEVICES={"cpu"}, Graph=lambda function, device: function):
        return graphs.last_hidden(*given)


def in_segments(append, *given):
    """As on CUDA, where a kernel computes the segments that a CPU computes one by one."""
    with (mock.patch.object(llama, "kernels", lambda decoder: flash),
          mock.patch.object(flash, "attention", flash.plain_attention)):
        return append(*given)


def looking_ahead(policy, rules, kept=True):
    """The policy as on CUDA, with several tokens a look. kept: in slots that stay in place"""
    room = rules.max_context + rules.max_new_tokens
    regather = partial(sampling.regather, room, []) if kept else cache.regather
    return dataclasses.replace(policy, sample_replies=sampling.sample_replies, regather=regather)


@pytest.mark.usefixtures("float64")
class TestTrajectories:
    @settings(max_examples=20, deadline=None)
    @given(seed=st.integers(0, 9), longest=st.integers(0, 40), share=st.floats(0.01, 1),
           max_rows=st.integers(1, 14), context=st.sampled_from(["full", "limited", "single_turn"]),
           env=st.sampled_from(["Slow", "SlowAndFaulty", "Lottery"]),
           response_format=st.sampled_from(["free_think", "grounding_worldmodeling"]),
           max_new_tokens=st.integers(1, 70), room=st.integers(1, 120), kept=st.booleans(),
           append=st.sampled_from([
               llama.last_hidden, replayed, partial(in_segments, llama.last_hidden),
               partial(in_segments, replayed)]))
    def test_they_are_the_same_whatever_delays_shares_and_limits(
            self, seed, longest, share, max_rows, context, env, response_format, max_new_tokens,
            room, kept, append):
        """Lengths, stops, failures and contexts that fill up are drawn, too."""
        policy, frame = policy_and_frame(context, response_format)
        groups = PatientGroups(f"test_rows:{env}", 4, 3)
        first = len(frame.first_prompt_ids(
            frame.system_message(groups.envs[0]), groups.reset(seed)[0]))
        rules = Rules(max_new_tokens=max_new_tokens, max_context=first + 4 + room)
        draw = random.Random(seed)
        delayed = Delayed(f"test_rows:{env}", 4, 3, delays=iter(
            lambda: draw.randint(0, longest), None))
        groups.turn = delayed.turn = DescribedTurn(frame.parts, 0.5)
        expected = rollout.collect(policy, frame, groups, seed, rules)
        policy = dataclasses.replace(policy, last_hidden=append)
        rules = dataclasses.replace(rules, feed_share=share, max_rows=max_rows)
        ahead = looking_ahead(policy, rules, kept)
        for play, player, envs in ((collect, policy, delayed), (collect, ahead, delayed),
                                   (rollout.collect, ahead, groups)):
            played = play(player, frame, envs, seed, rules)
            assert said(played) == said(expected)
            assert logprobs(played) == pytest.approx(logprobs(expected), abs=1e-7)

    def test_gradients_are_those_of_the_slow_step_with_threads_and_real_delays(self, real):  # noqa: F811
        for options in ({}, dict(context="limited", window=2), dict(algo="ppo", max_rows=3)):
            assert_equal(real, configured(env="test_rows:SlowAndFaulty", feed_share=0.3, **options))

    @pytest.mark.parametrize("name", ["Qwen3.5", "LFM3", "Granite 4 H"])
    def test_no_token_is_fed_twice_to_layers_with_states(self, name):
        """Keys could be written again; a state cannot be taken back."""
        policy, frame = family(name), policy_and_frame()[1]
        policy.model.double()
        given = (policy, frame, PatientGroups("test_rows:Slow", 4, 3), 0,
                 Rules(max_new_tokens=12, max_context=320))
        assert said(collect(*given)) == said(rollout.collect(*given))


def test_looking_ahead_reads_tokens_eight_at_a_time_and_captures_each_size_once(monkeypatch):
    """The slots stay the same, so later turns and rollouts repeat the graphs of the first."""
    policy, frame = policy_and_frame()
    policy.model.float()
    rules, looks, made = Rules(max_new_tokens=20, max_context=400), [], []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self, read=torch.Tensor.tolist: (
        looks.append(self.dim()), read(self))[1])
    monkeypatch.setattr(graphs, "Step", lambda *given, step=graphs.Step: (
        made.append(given[1:]), step(*given))[1])
    policy = dataclasses.replace(looking_ahead(policy, rules), last_hidden=replayed)
    groups = EnvGroups("test_rows:Endless", 6, 3)
    played = rollout.collect(policy, frame, groups, 0, rules)
    turns = max(len(t.turns) for t in played)
    longest = [max(t.sequences[0].turn_ids.count(k) for t in played) for k in range(turns)]
    assert looks.count(3) == sum(-(-n // 8) for n in longest) and turns > 2
    sizes = [rows for _, rows in made]  # each at most a quarter of the one before
    assert len({slots for slots, _ in made}) == 1 and sizes[1:]
    assert all(4 * less <= more for more, less in zip(sizes, sizes[1:])), sizes
    assert said(rollout.collect(policy, frame, groups, 0, rules)) == said(played)
    assert len(made) == len(sizes)


def test_slots_stay_where_they_are_if_they_take_a_small_share_of_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(
        total_memory=4000))
    assert sampling.may_stay(torch.device("cuda"), 500)
    assert not sampling.may_stay(torch.device("cuda"), 501)
    for stays, capacity in ((True, 640), (False, 128)):
        monkeypatch.setattr(sampling, "may_stay", lambda *given, stays=stays: stays)
        slots, kept = cache.KVSlots(tiny()[0].model, 2, 64), []
        assert sampling.regather(600, kept, [(slots, [1, 0])], 100).capacity == capacity
        assert bool(kept) == stays


@pytest.mark.parametrize("context, max_rows", [("full", 256), ("full", 4), ("limited", 4)])
def test_with_a_share_of_1_not_even_rounding_depends_on_the_delays(monkeypatch, context, max_rows):
    """So runs, even killed ones, repeat bit for bit: each pass has the same rows in order."""
    policy, frame = policy_and_frame(context)
    policy.model.float()
    passes, extend = [], Policy.extend
    monkeypatch.setattr(Policy, "extend", lambda self, slots, tokens, *rest: (
        passes.append(tokens.tolist()), extend(self, slots, tokens, *rest))[1])
    seen = []
    for seed in range(3):
        passes.clear()
        played = collect(policy, frame, Delayed("test_rows:Slow", 5, 3, delays=iter(
            partial(random.Random(seed).randint, 0, 30), None)), 0,
            Rules(max_new_tokens=14, max_rows=max_rows))
        seen.append((said(played), logprobs(played), list(passes)))
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.usefixtures("float64")
class TestFeeding:
    def fed(self, monkeypatch, groups, **rules):
        """(rows, tokens of each) of every forward pass, and the trajectories."""
        passes, extend = [], Policy.extend
        monkeypatch.setattr(Policy, "extend", lambda self, slots, tokens, *rest: (
            passes.append(tuple(tokens.shape)), extend(self, slots, tokens, *rest))[1])
        policy, frame = policy_and_frame()
        rules = Rules(max_new_tokens=9, max_context=500, **rules)
        played = collect(policy, frame, groups, 3, rules)
        return passes, played

    @pytest.mark.parametrize("env, share, max_rows, expected", [
        ("Lottery", 1.0, 12, False), ("Lottery", 1.0, 11, True), ("Lottery", 0.9, 12, True),
        ("Slow", 1.0, 12, True)])
    def test_rows_move_on_with_a_share_with_more_episodes_than_rows_or_where_environments_wait(
            self, monkeypatch, env, share, max_rows, expected):
        """Then an environment gets a reply as soon as it has stopped; else rows keep together."""
        groups = Delayed(f"test_rows:{env}", 4, 3)
        self.fed(monkeypatch, groups, feed_share=share, max_rows=max_rows)
        assert bool(groups.sent) == expected

    def test_a_small_share_of_all_is_fed_while_others_sample(self, monkeypatch):
        fed = {}
        for share in (0.1, 0.99):
            passes, played = self.fed(monkeypatch, Delayed("test_rows:Slow", 12, 1),
                                      feed_share=share)
            fed[share] = sum(q > 1 for _, q in passes)
        turns = max(len(t.turns) for t in played)
        assert fed[0.1] - 1 > 2 * turns and fed[0.99] < fed[0.1]  # without the first prompts

    def test_a_share_of_all_is_enough_and_one_if_nothing_can_be_sampled(self, monkeypatch):
        """Eleven of twelve environments take very long."""
        groups = Delayed("test_rows:Endless", 12, 1, delays=itertools.chain(
            [0], [10_000] * 11, itertools.repeat(0)))
        passes, played = self.fed(monkeypatch, groups, feed_share=0.5)
        quick = played.pop(groups.sent[0][0])
        assert len(quick.turns) > 1 and passes.count((1, 1)) > 1  # it went on alone
        assert quick.turns[-1].times[2] < min(t.turns[0].times[2] for t in played)

    def test_no_more_than_max_rows_are_played_and_those_that_end_make_room(self, monkeypatch):
        groups = PatientGroups("test_rows:Lottery", 40, 1)
        passes, played = self.fed(monkeypatch, groups, max_rows=8)
        assert max(n for n, _ in passes) == 8
        batches = sum(max(len(t.turns) for t in played[i:i + 8]) for i in range(0, 40, 8))
        assert sum(q == 1 for _, q in passes) < 0.8 * 9 * batches
        begun = [t.turns[0].times[0] for t in played]
        assert begun == sorted(begun) and len({*begun}) > 8  # in their order, not in batches

    def test_a_turn_knows_when_it_was_fed_sent_and_answered(self):
        policy, frame = policy_and_frame()
        for t in collect(policy, frame, EnvGroups("test_rows:Lottery", 3, 2), 0,
                         Rules(max_new_tokens=5)):
            times = [when for turn in t.turns for when in turn.times]
            assert times == sorted(times) and len(times) == 3 * len(t.turns)


class TestThreads:
    """PatientGroups: what `receive` gives, and when."""

    @pytest.fixture
    def gates(self, monkeypatch):
        """An event for each row; its step waits for it."""
        gates = [threading.Event() for _ in range(3)]
        groups = PatientGroups("test_rows:Slow", 3, 1)
        groups.reset(0)
        for env, gate in zip(groups.envs, gates):
            env._match = env.step
            monkeypatch.setattr(env, "step", lambda answer, env=env, gate=gate: (
                gate.wait(10), env._match(answer))[1])
        yield groups, gates
        for gate in gates:
            gate.set()

    def test_each_row_answers_when_it_can(self, gates):
        groups, (first, second, third) = gates
        groups.send([0, 1, 2], [WORD] * 3)
        assert groups.receive(wait=False) == {}
        second.set()
        assert [*groups.receive()] == [1]
        groups.send([1], [WORD])  # its gate is open
        assert [*groups.receive()] == [1]
        first.set()
        third.set()
        results = {}
        while len(results) < 2:
            results |= groups.receive()
        assert {*results} == {0, 2} and groups.receive() == {}

    def test_several_threads_may_step_rows_of_their_own(self, gates):
        """As conversations with a server do (more/api.py)."""
        groups, gates = gates
        expected = EnvGroups("test_rows:Slow", 3, 1)
        expected.reset(0)
        with ThreadPoolExecutor(3) as pool:
            stepped = [pool.submit(groups.step, [row], [WORD]) for row in range(3)]
            for row in (2, 0, 1):
                gates[row].set()
                assert stepped[row].result(5) == expected.step([row], [WORD])

    def test_after_an_interrupted_rollout_nothing_of_it_is_left(self, gates):
        groups, (first, *_) = gates
        groups.send([0, 1], [WORD] * 2)
        old = groups.envs[0]
        groups.reset(5)
        first.set()
        assert groups.receive(wait=False) == {} and groups.envs[0] is not old
        groups.send([0], [WORD])
        assert [*groups.receive()] == [0]

    def test_nor_after_an_interrupted_step(self, gates, monkeypatch):
        groups, _ = gates
        old = [*groups.envs]
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(run_groups._Calls, "take", lambda *_: (_ for _ in ()).throw(
                KeyboardInterrupt))
            groups.step([1], [WORD])
        groups.reset(5)
        assert [env is before for env, before in zip(groups.envs, old)] == [True, False, True]
