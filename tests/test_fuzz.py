"""A short form of fuzz.py: replies in every environment, bytes for every reader."""

import random

import pytest
from fuzz import SLOW, TARGETS, Source, play_replies

from minragen.environments import board, countdown, data, lean
from minragen.envs import REGISTRY


class TestReplies:
    @pytest.mark.parametrize("name", REGISTRY)
    def test_none_raises_beats_the_solver_or_is_answered_outside_the_space(self, name):
        replies = 40 if name in SLOW else 240
        episodes, valid = play_replies(name, replies)
        assert episodes >= replies / 12 and replies / 3 < valid < replies

    @pytest.mark.parametrize("worse, said", [
        (countdown.Outcome(9.0), "beats"), (countdown.Outcome(float("nan")), "nan"), (1, "'int'")])
    def test_each_promise_that_is_broken_is_noticed(self, worse, said, monkeypatch):
        act = countdown.Countdown._act
        monkeypatch.setattr(countdown.Countdown, "_act",
                            lambda env, text: worse if " + " not in text else act(env, text))
        with pytest.raises(AssertionError, match=said):
            play_replies("countdown", 240)


class TestReaders:
    @pytest.mark.parametrize("target", TARGETS)
    def test_random_bytes_and_edited_documents_are_read_or_refused_as_documented(self, target):
        """The targets assert: an exception that is not documented leaves them."""
        read_much(target)

    @pytest.mark.parametrize("target, module, name", [
        ("records", data, "read_records"), ("relations", board, "read_relations"),
        ("parser", lean, "tidy_tactic")])
    def test_another_exception_is_noticed(self, target, module, name, monkeypatch):
        monkeypatch.setattr(module, name, None)
        with pytest.raises((AttributeError, TypeError)):
            read_much(target)


def read_much(target):
    rng = random.Random(target)
    for _ in range(300):
        TARGETS[target](Source(rng.randbytes(rng.choice((8, 20, 40, 100, 300)))))
