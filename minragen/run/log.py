"""What a run prints and writes while it trains: metrics, some episodes, checkpoints, errors.

Whatever ends the run, finished steps are kept: if a tool's server is gone a checkpoint is saved,
and no checkpoint is ahead of metrics.jsonl.

Tests: `python -m pytest tests/test_runs.py tests/test_train.py`.
"""

import contextlib
import dataclasses
import json
import math
import pkgutil
import signal
import sys
import time
from collections import Counter

from tqdm import tqdm

from minragen import train
from minragen.environments.limits import ServerGone
from minragen.look import diagnostics
from minragen.look.faults import fault_of, first_line
from minragen.run import distributed, runs

SAMPLE = 4  # episodes of a split that a step writes to trajectories.jsonl; as many failed
ENDED = "the run ended"  # in errors.txt
# Metrics that differ between equal runs, also as ENV/waited or first_turn/seconds.
TIMES = {"seconds", "rollout_seconds", "tokens_per_second", "rollout_idle", "waited", "elapsed"}
# Metric -> its part of the console line.
CONSOLE = {
    "step": "step {:3d}/{of}", "success": "success {:.3f}", "episode_return": "return {:.3f}",
    "valid": "valid {:.2f}", "groups_kept": "kept {:2d}/{groups}{no_update}",
    "entropy": "ent {:.3f}", "kl_ref": "kl {:.3f}", "grad_norm": "grad {:.3f}",
    "logprob_gap": "gap {:.0e}", "tokens_per_second": "{:5.0f} tok/s", "seconds": "{:.2f} s",
    "val/success": "val {:.3f}", "test/success": "test {:.3f}", "regime": "{}"}


class Log(train.Callbacks):
    """What a run in `folder` prints and keeps. Until its end no other process may train the run. Of
    several processes the first one writes; the Logs of the others keep quiet."""

    def __init__(self, folder, config, learner, resume=False, say=print):
        """Make the folder of a new run, write the Config, and drop the lines after the learner's
        step. self.history: the metrics that stay."""
        self.folder, self.config, self.learner, self.say = folder, config, learner, say
        self.writes, self.history = learner.world.rank == 0, []
        self.tell = lambda metrics: None  # writes a step elsewhere, too
        self.held = contextlib.ExitStack()  # the lock, and the handlers of signals
        if self.writes:
            if not resume:
                with runs.writing(folder):
                    folder.mkdir(parents=True)
            self.held.enter_context(runs.locked(folder))
            runs.write_whole(folder / "config.json", json.dumps(
                dataclasses.asdict(config) | {"data_files": runs.data_files(config.env_arg)},
                indent=1) + "\n")
            kept = {name: runs.lines_until(learner.step, folder / name)
                    for name in ("trajectories.jsonl", "metrics.jsonl")}
            self.history = kept["metrics.jsonl"]
            if config.log:
                from minragen.more import loggers

                self.tell = loggers.start(folder, config, self.history)
            for name, lines in kept.items():
                runs.write_whole(folder / name, json_lines(lines))

    def __enter__(self):
        self.requests = self.held.enter_context(stop_requests())
        return self

    def __exit__(self, kind, error, _):
        """Save what is done if a server has gone, and the traceback of what ended the run."""
        with self.held:
            if isinstance(error, ServerGone):
                self.save(self.learner)
            if self.writes and isinstance(error, Exception) and (fault := fault_of(error)).place:
                error.kept_in = self.keep(fault, ENDED)  # for `faults.told`

    progress = staticmethod(distributed.progress_bar)

    def diagnose(self, learner, step, played, rows, batch):
        if step == 1 and self.config.advantages != "none":
            self.say("\n".join(diagnostics.first_look(played, self.config)))
        metrics = diagnostics.diagnose(learner, self.config, step, played, self.history)
        if self.writes and batch:
            keep_advantages(played, rows, batch)
            metrics |= diagnostics.diagnose_update(learner, self.config, step, batch)
        return metrics

    def early_stop(self, metrics):
        reason = self.config.early_stop and diagnostics.early_stop([*self.history, metrics])
        return self.learner.world.gather(reason or "")[0]  # process 0 alone has the history

    def write(self, metrics):
        """Append rounded metrics to metrics.jsonl; print the console line and warnings. A resumed
        run may owe its last step a validation, whose metrics join that step's line."""
        if not self.writes:
            return
        before = self.history[-1]["step"] if self.history else None
        again = metrics["step"] == before and "elapsed" not in metrics
        metrics = self.history.pop() | metrics if again else metrics
        # JSON has no nan and no infinity.
        metrics = {k: None if isinstance(v, float) and not math.isfinite(v) else v
                   for k, v in metrics.items()}
        rounded = {k: round(v, 6) if isinstance(v, float) and abs(v) > 1e-3 else v
                   for k, v in metrics.items()}
        if again:
            runs.write_whole(self.folder / "metrics.jsonl", json_lines([*self.history, rounded]))
        else:
            self.append("metrics.jsonl", [rounded])
        self.history.append(rounded)
        self.tell(rounded)
        tqdm.write(console_line(metrics, self.config))
        sys.stdout.flush()
        for warning in diagnostics.warnings_of(self.history):
            self.say(f"warning   {warning}")

    def stop_requested(self):
        return any(self.learner.world.gather(bool(self.requests)))

    def save(self, learner, best=False):
        """Save a checkpoint once the disk holds all lines: it must not be ahead of them."""
        if self.writes:
            for name in ("metrics.jsonl", "trajectories.jsonl"):
                runs.flush(self.folder / name)
            runs.save_checkpoint(self.folder, learner, best)

    def append(self, name, rows):
        """Append JSON lines to a file."""
        path = self.folder / name
        with runs.writing(path), open(path, "a", encoding="utf-8") as file:
            file.write(json_lines(rows))

    def keep(self, fault, when):
        """Append a traceback to errors.txt: the first of each line of code, and what ended the run.
        Returns the file's path, None if it could not be written."""
        path = self.folder / "errors.txt"
        try:
            known = path.read_text(encoding="utf-8") if path.exists() else ""
            if when == ENDED or f"({fault.place})" not in known:
                with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(f"{when}: {fault}\n{fault.traceback}\n")
            return path
        except OSError as problem:
            tqdm.write(f"warning   cannot write {path}: {problem}")

    def episodes(self, step, split, trajectories):
        """Write a sample, one JSON object a line: in training the best and the worst members of a
        group, else the same instances at every step; and SAMPLE whose environment failed. Print
        the most common failure."""
        if not self.writes:
            return
        played = [t for t in trajectories if not t.error]
        failed = [t for t in trajectories if t.error]
        if split == "train" and played:  # another group each step, a trained one if there is any
            played = [t for t in played if t.sequences[0].advantages] or played
            groups = sorted({t.group_id for t in played})
            played = sorted((t for t in played if t.group_id == groups[step % len(groups)]),
                            key=lambda t: -t.episode_return)
            best, others = played[:SAMPLE // 2], played[SAMPLE // 2:]
            played = best + others[-SAMPLE // 2:]
        else:
            every = max(1, len(trajectories) // SAMPLE)
            played = [t for t in trajectories[::every] if not t.error]
        policy = self.learner.policy
        images = (pkgutil.resolve_name("minragen.more.vision:images_of") if policy.image_store else
                  lambda t: {})
        self.append("trajectories.jsonl", [{
            "step": step, "split": split, "env": t.env, "seed": t.seed, "group": t.group_id,
            "member": t.member, "success": t.success, "stop": t.stop.value, "error": t.error,
            "turn_rewards": t.turn_rewards, "messages": t.messages(), **images(t),
            "replies": replies(t, policy.tokenizer)} for t in played[:SAMPLE] + failed[:SAMPLE]])
        if failed:
            firsts = {t.fault.place: t for t in reversed(failed) if t.fault.place}
            kept = {place: self.keep(t.fault, f"step {step}, {split}, {t.env}")
                    for place, t in firsts.items()}
            (message, place, env), _ = Counter(
                (t.error, t.fault.place, t.env) for t in failed).most_common(1)[0]
            kept_in = f"; traceback in {kept[place]}" if kept.get(place) else ""
            where = f" ({env}, {place}{kept_in})" if place else ""
            tqdm.write(f"env error {len(failed)} {split} episodes failed in their environment and "
                       f"are left out: {first_line(message)}{where}")


def json_lines(rows):
    return "".join(json.dumps(row, default=float) + "\n" for row in rows)  # also numpy's numbers


def without_times(metrics):
    """A line of metrics.jsonl as equal runs write it."""
    return {key: value for key, value in metrics.items() if key.rpartition("/")[2] not in TIMES}


@contextlib.contextmanager
def stop_requests():
    """A list that fills at SIGTERM or Ctrl-C, so that the step can be finished and saved. One more
    ends the process if over a second later (sooner it is the same Ctrl-C from the launcher)."""
    requests = []

    def note(number, _):
        requests.append(time.monotonic())
        if requests[-1] > requests[0] + 1:
            raise KeyboardInterrupt
        if distributed.rank() == 0 and len(requests) == 1:
            tqdm.write("stopping  after this step; once more: at once, unsaved")

    with contextlib.ExitStack() as before:  # puts the handlers back
        for number in (signal.SIGINT, signal.SIGTERM):
            before.callback(signal.signal, number, signal.signal(number, note))
        yield requests


def console_line(metrics, config):
    """One aligned line, without the parts whose metric this step does not have."""
    known = {"of": config.steps, "groups": config.num_groups,
             "no_update": "" if metrics.get("policy_loss") is not None else ", no update",
             **metrics}
    return "  ".join(part.format(known[name], **known) for name, part in CONSOLE.items()
                      if known.get(name) is not None)  # a number that is not finite is None


# ---- An episode's entry --------------------------------------------------------------------------
def keep_advantages(trajectories, rows, batch):
    """Store the advantages of trained rows in their Sequences, for the report.

    rows: (b,) of the batch of all trajectories     batch: those rows, with advantages (b, T)
    """
    sequences = [sequence for t in trajectories for sequence in t.sequences]
    for row, advantages in zip(rows.tolist(), batch.advantages.tolist()):
        sequences[row].advantages = advantages[:len(sequences[row].tokens)]


def replies(trajectory, tokenizer):
    """Of each reply the texts of its tokens, their logprobs (nats), their advantages if trained."""
    def rounded(numbers):
        return [round(x, 3) if math.isfinite(x) else None for x in numbers]

    found = []
    for sequence in trajectory.sequences:
        for turn, last in sequence.last_of_turn.items():  # a reply is one stretch of ids
            part = slice(sequence.turn_ids.index(turn), last + 1)
            found.append({"tokens": texts_of(sequence.tokens[part], tokenizer),
                          "logprobs": rounded(sequence.sample_logprobs[part]),
                          "advantages": rounded(sequence.advantages[part])})
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
