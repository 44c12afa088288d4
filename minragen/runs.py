"""A run on disk: its folder, log and checkpoints, and how it is resumed.

    runs/NAME/config.json          the Config
              metrics.jsonl        one line a step, with the names of docs/metrics.md
              trajectories.jsonl   a few episodes of every step: chat messages, sampled tokens
              checkpoint/          a plain Hugging Face folder plus trainer state
              report.html          all of this on one page (report.py)

Reading order: `run_folder`, `Log`, `save_checkpoint`, `resumed_config`.

Tests: `python -m pytest tests/test_train.py -k "Runs or Resume"`.
"""

import dataclasses
import json
import math
import os
import re
import shutil
import sys
import zlib
from collections import Counter
from pathlib import Path

import torch
from tqdm import tqdm

from minragen.config import Config, check

RUNS = Path("runs")
# Fields of a Learner that a checkpoint stores as they are.
COUNTERS = ("step", "empty_steps", "rounds", "kl_reward_coef", "ema")
SAMPLE = 4  # episodes of a split that a step writes to trajectories.jsonl; and failed ones
FREE_ON_RESUME = ("run", "steps", "max_context", "device", "threads", "max_rows", "token_budget",
                  "activation_checkpointing")
# Metric -> its part of the console line.
CONSOLE = {
    "step": "step {:4d}/{of}", "success": "success {:.3f}", "episode_return": "return {:6.3f}",
    "valid": "valid {:.2f}", "groups_kept": "kept {:2d}/{groups}", "entropy": "entropy {:.3f}",
    "kl_ref": "kl_ref {:.4f}", "grad_norm": "grad {:6.3f}", "logprob_gap": "gap {:.0e}",
    "tokens_per_second": "tok/s {:6.0f}", "seconds": "sec {:5.2f}",
    "val/success": "val {:.3f} greedy {val/success_greedy:.3f}",
    "test/success": "test {:.3f} greedy {test/success_greedy:.3f}", "regime": "{}"}


def run_folder(config, resume):
    """The run's folder. An unnamed run gets a free name; a name that is taken is refused."""
    if config.run:
        folder = RUNS / config.run
        if folder.exists() and not resume:
            raise ValueError(f"run {config.run!r} exists already. Continue it with --run "
                             f"{config.run} --resume, choose another name, or delete {folder}.")
        return folder
    env, model = config.env.replace(",", "+"), Path(config.model).name
    stem = re.sub(r"[^\w.+=-]+", ".", f"{env}-{config.algo}-{model}-s{config.seed}")
    names = (stem if i == 1 else f"{stem}-{i}" for i in range(1, 10**6))
    return next(RUNS / n for n in names if not (RUNS / n).exists())


def begin(folder, config, learner, resume, writes=True):
    """Make the folder of a new run, write its Config, and open its Log. One of several processes
    `writes`; the others get a Log that keeps quiet."""
    if not writes:
        return Log(folder, learner, writes)
    if not resume:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise ValueError(f"another process just made {folder}. Take another --run.") from None
    write_whole(folder / "config.json", json.dumps(dataclasses.asdict(config), indent=1) + "\n")
    return Log(folder, learner)


def write_whole(path, text):
    """Write beside and rename, so that a kill leaves the old file or the new one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # a watcher may write the same file
    part.write_text(text, encoding="utf-8")
    part.replace(path)


class Log:
    """metrics.jsonl, trajectories.jsonl and the console line."""

    def __init__(self, folder, learner, writes=True):
        """Drop the lines after the learner's step. self.history: the metrics that stay."""
        self.folder, self.writes, self.history = folder, writes, []
        self.tokenizer = learner.policy.tokenizer
        if writes:
            self._keep("trajectories.jsonl", learner.step)
            self.history = [json.loads(line)
                            for line in self._keep("metrics.jsonl", learner.step)]

    def _keep(self, name, step):
        path = self.folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        lines = [line for line in lines if _before(step, line)]
        write_whole(path, "".join(line + "\n" for line in lines))
        return lines

    def write(self, metrics, config):
        """Append the metrics to metrics.jsonl, rounded, and print the console line."""
        if not self.writes:
            return
        # JSON has no nan and no infinity.
        metrics = {k: None if isinstance(v, float) and not math.isfinite(v) else v
                   for k, v in metrics.items()}
        rounded = {k: round(v, 6) if isinstance(v, float) and abs(v) > 1e-3 else v
                   for k, v in metrics.items()}
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(rounded) + "\n")
        self.history.append(rounded)
        tqdm.write(console_line(metrics, config))
        sys.stdout.flush()

    def trajectories(self, step, split, episodes):
        """Write a sample, one JSON object a line: in training the best and the worst members of a
        group, else the same instances at every step; and SAMPLE whose environment failed. Print
        the most common failure."""
        if not self.writes:
            return
        played = [t for t in episodes if not t.error]
        failed = [t for t in episodes if t.error]
        if split == "train" and played:  # another group each step, a trained one if there is any
            played = [t for t in played if t.sequences[0].advantages] or played
            groups = sorted({t.group_id for t in played})
            played = sorted((t for t in played if t.group_id == groups[step % len(groups)]),
                            key=lambda t: -t.episode_return)
            played = played[:SAMPLE // 2] + played[SAMPLE // 2:][-SAMPLE // 2:]
        else:
            played = [t for t in episodes[::max(1, len(episodes) // SAMPLE)] if not t.error]
        with open(self.folder / "trajectories.jsonl", "a") as file:
            for t in played[:SAMPLE] + failed[:SAMPLE]:
                file.write(json.dumps({
                    "step": step, "split": split, "env": t.env, "seed": t.seed, "group": t.group_id,
                    "member": t.member, "success": t.success, "stop": t.stop.value,
                    "error": t.error, "turn_rewards": t.turn_rewards, "messages": t.messages(),
                    "replies": replies(t, self.tokenizer)}) + "\n")
        if failed:
            (message, _), = Counter(t.error for t in failed).most_common(1)
            tqdm.write(f"env error {len(failed)} {split} episodes failed in their environment and "
                       f"are left out: {message.splitlines()[0][:300]}")


def replies(trajectory, tokenizer):
    """Of each reply the texts of its tokens, their logprobs (nats), their advantages if trained."""
    found = []
    for sequence in trajectory.sequences:
        for turn in sorted({*sequence.turn_ids} - {-1}):
            start = sequence.turn_ids.index(turn)  # a reply is one stretch of ids
            part = slice(start, start + sequence.turn_ids.count(turn))
            found.append({"tokens": texts_of(sequence.tokens[part], tokenizer),
                          "logprobs": _rounded(sequence.sample_logprobs[part]),
                          "advantages": _rounded(sequence.advantages[part])})
    return found


def texts_of(ids, tokenizer):
    """The text that each id adds to those before it. A character of several ids is the last one's.
    Joined they are the decoded reply."""
    texts, known = [], 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end])
        whole = len(text) if end == len(ids) else len(text.rstrip("\ufffd"))
        texts.append(text[known:whole])
        known = max(known, whole)
    return texts


def _rounded(numbers):
    return [round(x, 3) if math.isfinite(x) else None for x in numbers]


def keep_advantages(trajectories, rows, batch):
    """Store the advantages of trained rows in their Sequences, for the report.

    rows: (b,) of the batch of all trajectories     batch: those rows, with advantages (b, T)
    """
    sequences = [sequence for t in trajectories for sequence in t.sequences]
    for row, advantages in zip(rows.tolist(), batch.advantages.tolist()):
        sequences[row].advantages = advantages[:len(sequences[row].tokens)]


def _before(step, line):
    """Whether a line is from `step` or before; never the final test's."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:  # a kill may cut off the last line
        return False
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
        return False
    final = entry.get("split") == "test" or any(name.startswith("test/") for name in entry)
    return entry["step"] <= step and not final


def console_line(metrics, config):
    """One aligned line, without the parts whose metric this step does not have."""
    known = {"of": config.steps, "groups": config.num_groups,
             "val/success_greedy": math.nan, "test/success_greedy": math.nan, **metrics}
    return " | ".join(part.format(known[name], **known) for name, part in CONSOLE.items()
                      if known.get(name) is not None)  # a number that is not finite is None


# ---- Checkpoints ---------------------------------------------------------------------------------
def save_checkpoint(folder, learner):
    """Write a plain Hugging Face folder plus trainer state beside, then rename it into place.

    A kill at any instant leaves a whole checkpoint: the manifest is written last, and the old
    checkpoint stays until then. The next save completes interrupted renames.
    """
    current, new, old = (folder / f"checkpoint{end}" for end in ("", ".new", ".old"))
    # Finish the renames of a save that was killed.
    if not current.exists() and (new / "manifest.json").exists():
        new.rename(current)
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    learner.policy.model.save_pretrained(new)
    learner.policy.tokenizer.save_pretrained(new)
    critic = learner.critic and {"model": learner.critic.state_dict(),
                                 "optimizer": learner.critic_optimizer.state_dict()}
    reference = learner.reference and learner.reference.state_dict()
    torch.save({**{name: getattr(learner, name) for name in COUNTERS},
                "optimizer": learner.optimizer.state_dict(),
                "critic": critic, "reference": reference}, new / "trainer.pt")
    files = {p.name: [p.stat().st_size, zlib.crc32(p.read_bytes())] for p in sorted(new.iterdir())}
    write_whole(new / "manifest.json", json.dumps({"step": learner.step, "files": files}, indent=1))
    if current.exists():
        current.rename(old)
    new.rename(current)
    shutil.rmtree(old, ignore_errors=True)


def find_checkpoint(folder):
    """The whole checkpoint of a run. Raises ValueError if it is missing or damaged."""
    # A save killed between its renames leaves no `checkpoint` but a whole `checkpoint.new`.
    paths = [folder / name for name in ("checkpoint", "checkpoint.new")]
    path = next((p for p in paths if (p / "manifest.json").exists()), None)
    if path is None:
        raise ValueError(f"{folder} has no checkpoint yet. Delete it and start again.")
    damaged = (f"checkpoint {path} is damaged: {{}} has changed. Restore it, or delete {folder} "
               f"and start again.")
    try:
        files = dict(json.loads((path / "manifest.json").read_text())["files"])
        expected = {file: (int(size), int(crc)) for file, (size, crc) in files.items()}
    except (ValueError, TypeError, KeyError):
        raise ValueError(damaged.format("manifest.json")) from None
    for file in {"config.json", "model.safetensors", "trainer.pt", *expected}:
        data = (path / file).read_bytes() if (path / file).is_file() else b""
        if (len(data), zlib.crc32(data)) != expected.get(file):
            raise ValueError(damaged.format(file))
    return path


def load_trainer_state(checkpoint, learner):
    """Fill in all of a Learner but the policy's weights, which are already loaded."""
    state = torch.load(checkpoint / "trainer.pt", map_location=learner.policy.device,
                       weights_only=True)
    for name in COUNTERS:
        setattr(learner, name, state[name])
    learner.optimizer.load_state_dict(state["optimizer"])
    if learner.critic:
        learner.critic.load_state_dict(state["critic"]["model"])
        learner.critic_optimizer.load_state_dict(state["critic"]["optimizer"])
    if learner.reference is not None:
        learner.reference.load_state_dict(state["reference"])


# ---- Resuming ------------------------------------------------------------------------------------
def resumed_config(given):
    """The run's own Config with the given options, which may only be those of FREE_ON_RESUME."""
    if not given.get("run"):
        raise ValueError("--resume needs --run NAME.")
    stored = load_config(given["run"])
    for name, value in given.items():
        if name not in FREE_ON_RESUME and value != getattr(stored, name):
            raise ValueError(f"--resume keeps the run's settings: {name} was "
                             f"{getattr(stored, name)!r}, got {value!r}. Start a new run.")
    config = dataclasses.replace(stored, **given)
    if config.steps > stored.steps and config.lr_final != 1 and not config.decay_steps:
        # Keep the original decay; added steps run at its final rate.
        config = dataclasses.replace(config, decay_steps=stored.steps)
    for name in ("max_context", "steps"):
        if getattr(config, name) < getattr(stored, name):
            raise ValueError(f"--resume cannot reduce {name}: it was {getattr(stored, name)}, got "
                             f"{getattr(config, name)}.")
    check(config)
    return config


def load_config(run):
    """The Config of runs/RUN, with the name that the folder has now. Raises ValueError."""
    folder = RUNS / run
    if not (folder / "config.json").exists():
        known = sorted(p.parent.name for p in RUNS.glob("*/config.json"))
        raise ValueError(f"unknown run {run!r}. Known: {', '.join(known) or 'none'}.")
    return dataclasses.replace(read_config(folder), run=run)


def read_config(folder):
    """The Config in folder/config.json. Raises ValueError if there is no valid one."""
    try:
        stored = json.loads((folder / "config.json").read_text())
        config = Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()})
        for f in dataclasses.fields(config):
            value = getattr(config, f.name)
            if not isinstance(value, (int, float) if f.type is float else f.type):
                raise TypeError(f"{f.name} is {value!r}")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder}/config.json cannot be read: {error}.") from None
    return config
