"""Short runs, shared by several test files."""

import contextlib
import io
import json
import shlex

import pytest
import torch

from minragen import train
from minragen.run.log import without_times
from minragen.run.start import main

# Episodes of one turn, where it does not matter what is played.
BRIEF = shlex.split("--env bandit --num-groups 2 --group-size 4 --val-size 4 --val-every 2 "
                    "--save-every 2 --mini-batch 4")


def run(line, *more):
    main([*line.split(), *more])


def interrupted(line, *more):
    """A run in which somebody presses Ctrl-C."""
    with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as printed:
        run(line, *more)
    assert "stopped. If the run has a checkpoint, --run NAME --resume" in printed.getvalue()


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def changed(path, **values):
    """Change values of the JSON object in a file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def metrics(folder):
    return [*map(without_times, read_lines(folder / "metrics.jsonl"))]


def state_text(folder):
    """The checkpoint's trainer.pt as text."""
    state = torch.load(folder / "checkpoint" / "trainer.pt", weights_only=True)
    return json.dumps(state, sort_keys=True, default=lambda tensor: tensor.tolist())


def assert_resumed_alike(runs, monkeypatch, options):
    """A run that is killed in its second step and resumed stores what an uninterrupted one does."""
    run("--run straight", *options)
    real = train.roll_out

    def roll_out(learner, *arguments):
        if learner.step == 1:
            raise KeyboardInterrupt
        return real(learner, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(train, "roll_out", roll_out)
        interrupted("--run stopped", *options)
    with open(runs / "stopped" / "metrics.jsonl", "a") as file:  # a kill leaves such lines
        file.write('{"step": 2, "success": 1.0}\n{"step": 3, "succ')
    run("--run stopped --resume")
    one, other = (metrics(runs / name) for name in ("straight", "stopped"))
    assert [line["step"] for line in one] == [line["step"] for line in other]
    assert not {name for a, b in zip(one, other) for name in a | b if a.get(name) != b.get(name)}
    assert state_text(runs / "straight") == state_text(runs / "stopped")
    for file in ("checkpoint/model.safetensors", "reference.pt", "trajectories.jsonl"):
        one, other = ((runs / name / file).read_bytes() for name in ("straight", "stopped"))
        assert one == other, file
