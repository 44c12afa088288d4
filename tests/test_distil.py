"""Other weights than the newest: a teacher in the place of the model before RL (on-policy
distillation), and samples of older weights with their correction (more/stale.py). Whole steps with
stale samples are compared with plain loops in test_step.py::TestCollect."""

import shlex
from types import SimpleNamespace

import pytest
import torch
from conftest import message, parsed
from toys import tiny
from training import BRIEF, assert_resumed_alike, metrics, run

from minragen.more.stale import OlderWeights
from minragen.run import bundled, start

DISTIL = ["--advantages", "none", "--kl-coef", "1", "--filter", "none", "--entropy-coef", "0"]


class TestTeacher:
    def test_the_kl_to_the_run_that_is_named_falls_and_that_one_has_no_gradients(self, runs):
        run("--run teacher --steps 3 --lr 4e-3", *BRIEF)
        run("--run taught --steps 8 --lr 1e-3 --teacher teacher", *BRIEF, *DISTIL)
        config = parsed(*BRIEF, *DISTIL, "--teacher", "teacher")
        teacher = start.teacher_of(config, start.load(config)[0])
        assert not any(p.requires_grad for p in teacher.model.parameters())
        gap = [line["kl_ref"] for line in metrics(runs / "taught") if "kl_ref" in line]
        assert gap[0] > 1e-3 and sum(gap[-3:]) < 0.5 * sum(gap[:3])

    def test_a_resumed_run_keeps_the_teacher_as_it_was(self, runs, begun):
        """Also beside adapters, whose base is the model before RL."""
        pytest.importorskip("peft")
        options = [*BRIEF, *DISTIL,
                   *shlex.split("--teacher a --lora-rank 2 --lr-final 1 --save-every 1")]
        run("--run whole --steps 2", *options)
        run("--run half --steps 1", *options)
        run("--run a --resume --steps 3")
        assert metrics(begun)[3]["grad_norm"] > 0  # it is another one by now
        run("--run half --resume --steps 2")
        assert len({metrics(runs / name)[2]["kl_ref"] for name in ("whole", "half")}) == 1

    def test_what_cannot_teach_is_refused_with_a_sentence(self, runs):
        run("--env frozenlake --run lake --steps 1 --num-groups 2 --group-size 2 --val-size 2 "
            "--warmup-steps 0 --max-turns 1 --max-new-tokens 6 --diagnose-every 0")
        for teacher, options, said in (
                ("lake", DISTIL, "its tokenizer is another one than that of 'tiny'"),
                ("nobody", DISTIL, "unknown run 'nobody'"),
                ("./nobody", DISTIL, "cannot load model './nobody'"),
                ("lake", [], "teacher: got lake, but it has no effect here. It needs a kl_coef")):
            assert said in message("--run", "x", *BRIEF, "--teacher", teacher, *options), said


class TestOlderWeights:
    def test_the_newest_weights_come_back_after_an_error(self):
        model = torch.nn.Linear(1, 1, bias=False)
        playing = OlderWeights(SimpleNamespace(model=model), 1)
        with playing():
            model.weight.data.fill_(7)  # lost: a rollout changes nothing
        model.weight.data.fill_(5)
        for _ in range(2):
            with pytest.raises(KeyError), playing():
                raise KeyError
            assert model.weight == 5
        with playing():  # the rollout that failed, again
            assert model.weight != 5

    def test_a_resumed_run_plays_with_the_older_weights_that_it_had(self, runs, monkeypatch):
        options = shlex.split("--save-every 1 --steps 4 --stale 2 --tis-cap 2 --kl-coef 0.1")
        assert_resumed_alike(runs, monkeypatch, [*BRIEF, *options])


class TestTruncatedWeights:
    def test_in_float32_they_are_refused_without_stale_samples(self, monkeypatch, tmp_path):
        bundled.save_folder(tiny()[0], tmp_path)
        config = parsed("--env", "bandit", "--model", str(tmp_path), "--tis-cap", "2")
        with pytest.raises(ValueError, match="tis_cap: it has no effect here. In float32"):
            start.build_learner(config, start.build_groups(config))
