"""nano.py: its gradients are those of train.py, and it trains what it sampled."""

import io
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from toys import Lottery, sampled

from minragen import nano
from minragen import train as trainer
from minragen.chat import ChatFrame
from minragen.config import preset
from minragen.envs import Observation
from minragen.models import AdamW
from minragen.run.tiny import tiny_policy
from minragen.trajectory import Sequence, Trajectory, make_batch


@pytest.fixture
def played(monkeypatch):
    """An untrained policy, its frame, and 3 groups of 4 of its episodes of one to three turns."""
    for name, value in dict(Nim=Lottery, MAX_NEW_TOKENS=6, GROUP_SIZE=4,
                            LEARNING_RATE=1e-4).items():
        monkeypatch.setattr(nano, name, value)
    policy = tiny_policy([Lottery()])
    frame = ChatFrame(policy.tokenizer)
    return policy, frame, nano.collect(policy, frame, "train", 0, 3, 4)


def test_the_gradients_of_each_optimizer_step_are_those_of_train(played, monkeypatch):
    policy, frame, episodes = played
    for p in policy.model.parameters():  # away from the policy that played: ratios are clipped
        p.data += 0.02 * torch.randn_like(p)
    start, gradients = {k: v.clone() for k, v in policy.model.state_dict().items()}, []
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda weights, most: gradients.append(
        torch.cat([p.grad.flatten() for p in weights])) or gradients[-1].norm())
    monkeypatch.setattr(nano, "collect", lambda *_: episodes)
    nano.train(policy, frame, steps=1)
    policy.model.load_state_dict(start)
    config = replace(preset("bandit"), epochs=nano.EPOCHS, lr=nano.LEARNING_RATE, filter="none",
                     clip_low=nano.CLIP, clip_high=nano.CLIP, dual_clip=0.0, entropy_coef=0.0)
    learner = trainer.Learner(policy, frame, AdamW(policy.model.parameters(), config.lr))
    rows = [Sequence(e.tokens, e.response_mask, [mask - 1 for mask in e.response_mask],
                     e.sample_logprobs, last_of_turn={0: len(e.tokens) - 1}) for e in episodes]
    turn = SimpleNamespace(observation=Observation(""))
    batch = make_batch([Trajectory("", 0, i // 4, i % 4, turn_rewards=[e.episode_return],
                                   turns=[turn], sequences=[rows[i]])
                        for i, e in enumerate(episodes)])
    batch, _ = trainer.compute_targets(learner, batch, config)
    metrics = trainer.update(learner, batch, config, step=1)
    assert len({len(e.tokens) for e in episodes}) > 1 and 0.1 < metrics["clip_fraction"] < 0.9
    assert len(gradients) == 2 * nano.EPOCHS
    for ours, theirs in zip(gradients, gradients[nano.EPOCHS:]):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()


def test_the_tokens_that_are_trained_are_those_that_were_sampled(played, monkeypatch):
    policy, frame, episodes = played
    tokens, mask, old_logprobs, _ = nano.make_batch(episodes)
    logprobs = nano.token_logprobs(policy.model, tokens, mask)
    assert torch.allclose(logprobs, old_logprobs, atol=1e-5) and logprobs.std() > 0.1
    drawn, multinomial = [], torch.multinomial
    monkeypatch.setattr(torch, "multinomial", lambda p, num_samples: drawn.append(
        multinomial(p, num_samples)) or drawn[-1])
    one_by_one = [nano.collect(policy, frame, "train", seed, 1, 1)[0] for seed in range(4)]
    assert torch.cat(drawn).flatten().tolist() == [i for e in one_by_one for i in sampled(e)]
    assert any(e.env.turns_left < 2 for e in one_by_one)  # two turns at least
    cold = nano.collect(policy, frame, "train", 0, 1, 4, temperature=1e-6)
    first_replies = {(*e.tokens[:e.response_mask.index(True) + 6],) for e in cold}
    assert len(first_replies) == 1  # greedy
    end = frame.end_of_turn
    for seed in range(8):
        ended = nano.begin(frame, "train", seed, 0)
        length, ends = len(ended.tokens), ended.tokens.count(end)
        nano.add_token(frame, ended, end, -0.5)
        if not ended.over:
            break
    assert ended.response_mask[length] and sum(ended.response_mask) == 1
    assert ended.tokens.count(end) == ends + 2  # the reply's and the observation's


def test_main_plays_several_turns_and_never_trains_on_a_held_out_heap(runs, capsys, monkeypatch):
    for name, value in dict(NUM_GROUPS=8, GROUP_SIZE=2, HELD_OUT_SIZE=8, WARMUP_STEPS=2).items():
        monkeypatch.setattr(nano, name, value)
    heaps, played, begin, collect = {"train": set(), "test": set()}, [], nano.begin, nano.collect

    def noted(frame, split, *given):
        episode = begin(frame, split, *given)
        heaps[split].add(episode.env.heap)
        return episode

    monkeypatch.setattr(nano, "begin", noted)
    monkeypatch.setattr(nano, "collect", lambda *given: played.append(
        (given[2], collect(*given))) or played[-1][1])
    nano.main(steps=1)
    assert [split for split, _ in played] == ["test", "train", "test"]
    assert len(heaps["test"]) > 1 and heaps["test"] <= {6, 7, 11} and not (
        heaps["train"] & {6, 7, 11})
    replies = [sum(a > b for a, b in zip(e.response_mask, [False, *e.response_mask]))
               for _, episodes in played for e in episodes]
    assert max(replies) == nano.Nim.budget.max_turns
    assert capsys.readouterr().out.count("held-out success") == 2


@pytest.mark.parametrize("heap", range(2, 12))
def test_a_player_who_leaves_no_multiple_of_4_gets_one(heap):
    for taken in {1, 2, 3} - {heap % 4}:
        game = nano.Nim()
        game.reset(seed=0)
        game.heap = heap
        _, reward, terminated, *_ = game.step(str(taken))
        if taken < heap:
            assert game.heap == (heap - taken) // 4 * 4
            assert (reward, terminated) == (0.0, game.heap == 0)


def test_held_out_success_is_shown_before_the_first_step(monkeypatch):
    monkeypatch.setattr(sys, "stdout", out := io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr(nano, "held_out_success", lambda *_: 0.5)
    monkeypatch.setattr(nano, "collect", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        nano.train(SimpleNamespace(model=torch.nn.Linear(1, 1)), None, steps=1)
    assert b"success 0.500" in out.buffer.getvalue()
