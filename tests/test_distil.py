"""A teacher in the place of the model before RL: on-policy distillation."""

import shlex

import pytest
from conftest import message, parsed
from training import BRIEF, metrics, run

from minragen.run import start

DISTIL = ["--advantages", "none", "--kl-coef", "1", "--filter", "none", "--entropy-coef", "0"]


class TestTeacher:
    def test_the_kl_is_to_the_run_that_is_named_and_falls(self, runs):
        run("--run teacher --steps 6 --lr 2e-3", *BRIEF)
        run("--run taught --steps 12 --lr 1e-3 --teacher teacher", *BRIEF, *DISTIL)
        gap = [line["kl_ref"] for line in metrics(runs / "taught") if "kl_ref" in line]
        assert gap[0] > 1e-3 and sum(gap[-3:]) < 0.5 * sum(gap[:3])

    def test_a_resumed_run_keeps_the_teacher_as_it_was(self, runs, monkeypatch):
        """Also beside adapters, whose base is the model before RL."""
        pytest.importorskip("peft")
        run("--run teacher --steps 1", *BRIEF)
        options = [*BRIEF, *DISTIL,
                   *shlex.split("--teacher teacher --lora-rank 2 --lr-final 1 --save-every 1")]
        run("--run whole --steps 3", *options)
        run("--run half --steps 2", *options)
        run("--run teacher --resume --steps 4")
        run("--run half --resume --steps 3")
        one, other = (metrics(runs / name)[3]["kl_ref"] for name in ("whole", "half"))
        assert one == other

    def test_it_has_no_gradients(self, runs):
        run("--run teacher --steps 1", *BRIEF)
        config = parsed(*BRIEF, *DISTIL, "--teacher", "teacher")
        teacher = start.teacher_of(config, start.load(config)[0])
        assert not any(p.requires_grad for p in teacher.model.parameters())

    def test_what_cannot_teach_is_refused_with_a_sentence(self, runs):
        run("--env frozenlake --run lake --steps 1 --num-groups 2 --group-size 2 --val-size 2 "
            "--warmup-steps 0")
        for teacher, options, said in (
                ("lake", DISTIL, "its tokenizer is another one than that of 'tiny'"),
                ("nobody", DISTIL, "unknown run 'nobody'"),
                ("./nobody", DISTIL, "cannot load model './nobody'"),
                ("lake", [], "teacher: got lake, but it has no effect here. It needs a kl_coef")):
            assert said in message("--run", "x", *BRIEF, "--teacher", teacher, *options), said
