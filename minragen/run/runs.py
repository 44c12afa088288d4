"""A run on disk: its folder, log and checkpoints, and how it is resumed.

    runs/NAME/config.json          the Config
              metrics.jsonl        one line a step, with the names of docs/metrics.md
              trajectories.jsonl   a few episodes of every step: chat messages, sampled tokens
              checkpoint/          a plain Hugging Face folder plus trainer state
              checkpoint.old/      the one before; checkpoint.best/: the best in validation
              reference.pt         the model before RL, if LoRA or a KL needs it
              report.html          all of this on one page (report.py)
              errors.txt           tracebacks, if an environment or the run failed

Reading order: `run_folder`, `Log`, `save_checkpoint`, `resumed_config`.

Tests: `python -m pytest tests/test_runs.py`.
"""

import contextlib
import dataclasses
import difflib
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from minragen import train
from minragen.config import RUN_NAME, Config, check
from minragen.envs import ServerGone, nearest
from minragen.look import diagnostics
from minragen.look.faults import fault_of, first_line
from minragen.more import loggers, lora
from minragen.more.vision import images_of
from minragen.run import distributed

RUNS = Path("runs")
# Fields of a Learner that a checkpoint stores as they are.
COUNTERS = ("step", "empty_steps", "skipped", "halved", "rounds", "kl_reward_coef", "ema")
EMPTY_STEPS = 5  # consecutive steps without a single informative group after which a run stops
SAMPLE = 4  # episodes of a split that a step writes to trajectories.jsonl; and failed ones
FREE_ON_RESUME = ("run", "steps", "max_context", "device", "threads", "max_rows", "token_budget",
                  "activation_checkpointing", "log")
# Metrics that differ between equal runs.
TIMES = {"seconds", "rollout_seconds", "tokens_per_second", "elapsed", "first_turn/seconds",
         "trajectory/seconds"}
ENDED = "the run ended"  # in errors.txt
# Metric -> its part of the console line.
CONSOLE = {
    "step": "step {:3d}/{of}", "success": "success {:.3f}", "episode_return": "return {:.3f}",
    "valid": "valid {:.2f}", "groups_kept": "kept {:2d}/{groups}{no_update}",
    "entropy": "ent {:.3f}", "kl_ref": "kl {:.3f}", "grad_norm": "grad {:.3f}",
    "logprob_gap": "gap {:.0e}", "tokens_per_second": "{:5.0f} tok/s", "seconds": "{:.2f} s",
    "val/success": "val {:.3f} greedy {val/success_greedy:.3f}",
    "test/success": "test {:.3f} greedy {test/success_greedy:.3f}", "regime": "{}"}


def run_folder(config, resume):
    """The run's folder. An unnamed run gets a free name; a name that is taken is refused."""
    if config.run:
        folder, resumable = RUNS / config.run, (RUNS / config.run / "config.json").exists()
        if folder.exists() and not resume:
            raise ValueError(f"run {config.run!r} exists already. " + (
                f"Continue it with --run {config.run} --resume (make resume RUN={config.run}), or "
                f"choose another name." if resumable else
                f"{folder} is no run: it has no config.json. Choose another name."))
        return folder
    env, model = config.env.replace(",", "+"), Path(config.model).name
    stem = re.sub(r"[^\w.+=-]+", ".", f"{env}-{config.algo}-{model}-s{config.seed}")
    names = (stem if i == 1 else f"{stem}-{i}" for i in range(1, 10**6))
    return next(RUNS / n for n in names if not (RUNS / n).exists())


def begin(folder, config, learner, resume, say=print):
    """Make the folder of a new run and open its Log. Of several processes the first one writes;
    the others get a Log that keeps quiet."""
    if learner.world.rank == 0 and not resume:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise ValueError(f"another process just made {folder}. Take another --run.") from None
        except OSError as problem:
            raise OSError(f"{folder} cannot be made: {problem.strerror}. Start the run in a folder "
                          f"where you may write.") from None
    return Log(folder, learner, config, say)


def write_whole(path, text):
    """Write beside and rename, so that a kill leaves the old file or the new one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # a watcher may write the same file
    try:
        part.write_text(text, encoding="utf-8")
        flush(part)
        part.replace(path)
    except OSError as problem:
        part.unlink(missing_ok=True)
        raise OSError(f"{path}: {problem.strerror}") from None


@contextlib.contextmanager
def locked(folder):
    """Keep other processes from training this run, until this one ends, in whatever way.

    raises: ValueError naming the process that trains it
    """
    path = folder / "lock"
    try:
        path.touch()
    except OSError as problem:
        raise OSError(f"{path}: {problem.strerror}") from None
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"run {folder.name!r} is being trained by process {file.read()}. Wait "
                             f"for it, or stop it.") from None
        with contextlib.suppress(OSError):  # a full disk
            path.write_text(f"{os.getpid()}")
        yield


@contextlib.contextmanager
def stop_requests():
    """A list that fills at SIGTERM or Ctrl-C, so that the step can be finished and saved. Another
    one after a second ends the process at once: torchrun repeats a Ctrl-C at once."""
    requests = []

    def note(number, _):
        requests.append(time.monotonic())
        if requests[-1] > requests[0] + 1:
            raise KeyboardInterrupt
        tqdm.write("stopping  after this step; once more: at once, at the last checkpoint")

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def going_on(what):
    """Print what could not be written; the run goes on without it."""
    try:
        yield
    except OSError as problem:
        tqdm.write(f"warning   cannot write {what}: {problem}. The run goes on.")


class Log(train.Log, contextlib.AbstractContextManager):
    """metrics.jsonl, trajectories.jsonl, checkpoints and the console. Until its end no other
    process may train the run."""

    def __init__(self, folder, learner, config, say=print):
        """Write the Config and drop the lines after the learner's step. self.history: the metrics
        that stay."""
        self.folder, self.config, self.learner, self.say = folder, config, learner, say
        self.writes, self.history = learner.world.rank == 0, []
        self.tokenizer, self.unwritten = learner.policy.tokenizer, defaultdict(str)
        self.saved = learner.step  # of the last checkpoint; 0: of none
        self.held = contextlib.ExitStack()  # the lock, and the handlers of signals
        if self.writes:
            self.held.enter_context(locked(folder))
            write_whole(folder / "config.json",
                        json.dumps(dataclasses.asdict(config), indent=1) + "\n")
            kept = {name: self._kept(name, learner.step)
                    for name in ("trajectories.jsonl", "metrics.jsonl")}
            self.history = [json.loads(line) for line in kept["metrics.jsonl"]]
            self.tell = loggers.start(folder, config, self.history)
            for name, lines in kept.items():
                write_whole(folder / name, "".join(line + "\n" for line in lines))

    def _kept(self, name, step):
        path = self.folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if _before(step, line)]

    def __enter__(self):
        self.requests = self.held.enter_context(stop_requests())
        return self

    def __exit__(self, kind, error, _):
        if self.writes and isinstance(error, Exception) and (fault := fault_of(error)).place:
            error.kept_in = self.keep(fault, ENDED)  # for `faults.told`
        self.held.close()

    def append(self, name, rows):
        """Append JSON lines to a file, with those that a full disk refused before."""
        path = self.folder / name
        self.unwritten[name] += "".join(json.dumps(row) + "\n" for row in rows)
        with going_on(path):
            size = path.stat().st_size
            try:
                with open(path, "a") as file:
                    file.write(self.unwritten[name])
            except OSError:
                os.truncate(path, size)  # half a line may be there
                raise
            del self.unwritten[name]

    def save(self, learner, best=False):
        """Save a checkpoint if the disk holds all lines: it must not be ahead of them."""
        with going_on("a checkpoint"):
            for name in ("metrics.jsonl", "trajectories.jsonl"):
                if self.unwritten[name]:
                    raise OSError(f"{name} lacks lines")
                flush(self.folder / name)
            save_checkpoint(self.folder, learner, best)
            self.saved = learner.step

    def missing(self, step):
        """What of the run up to `step` is not on the disk, in words; "" if all is there."""
        lost = [f"{name} lacks the lines from step {json.loads(text.splitlines()[0])['step']} on"
                for name, text in self.unwritten.items() if text]
        if self.saved != step:
            try:
                last = find_checkpoint(self.folder, lambda line: None)
                lost.insert(0, f"{last.name} is of step {step_of(last)}")
            except (OSError, ValueError):
                lost.insert(0, "there is no checkpoint")
        return ", ".join(lost)

    @contextlib.contextmanager
    def keeping(self, learner, metrics=None):
        """If a server that the episodes need has gone, the run ends with a checkpoint, and with the
        `metrics` of a step that is done."""
        try:
            yield
        except ServerGone:
            if metrics:
                self.write(metrics)
            if self.writes and (learner.step == 0 or self.saved != learner.step):
                self.save(learner)
            raise

    @contextlib.contextmanager
    def progress(self, title, total=None):
        with distributed.progress_bar(title, total) as bar:
            yield bar.update

    def diagnose(self, step, played):
        return (diagnostics.diagnose(self.learner, self.config, step, played, self.history)
                if self.writes else {})

    def diagnose_update(self, step, played, rows, batch):
        keep_advantages(played, rows, batch)
        return (diagnostics.diagnose_update(self.learner, self.config, step, batch)
                if self.writes else {})

    def why_over(self, learner, metrics):
        reason = ""
        if learner.empty_steps >= EMPTY_STEPS:
            reason = (f"in {EMPTY_STEPS} steps in a row the filter ({self.config.filter} of "
                      f"{self.config.filter_metric}) kept no group, or every environment failed, "
                      f"so there is nothing to learn from. Is the task solved, or never solved? If "
                      f"few replies are valid, raise --warmup-steps.")
        elif self.config.early_stop:
            reason = diagnostics.early_stop([*self.history, *[metrics] * bool(metrics)])
        return reason and f"{reason} Read {self.folder}/trajectories.jsonl."

    def step_done(self, learner, last):
        for warning in diagnostics.warnings_of(self.history):
            self.say(f"warning   {warning}")
        if note := diagnostics.gradient_spike(self.history, self.config.max_grad_norm):
            self.say(f"note      {note}")
        asked = any(learner.world.gather(bool(self.requests)))
        due, best = learner.step % self.config.save_every == 0, self.writes and self.is_best()
        if self.writes and (due or last or best or asked):
            self.save(learner, best)
        if asked:
            lost = self.missing(learner.step) if self.writes else ""
            self.say(f"stopped   after step {learner.step}{', but ' * bool(lost)}{lost}; go on "
                     f"with: make resume RUN={self.folder.name}")
        return asked

    def keep(self, fault, when):
        """Append a traceback to errors.txt, of each line of code the first and what ends the run.
        Returns the file's path, None if it could not be written."""
        path = self.folder / "errors.txt"
        with going_on(path):
            known = path.read_text(encoding="utf-8") if path.exists() else ""
            if when == ENDED or f"({fault.place})" not in known:
                with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(f"{when}: {fault}\n{fault.traceback}\n")
            return path

    def is_best(self):
        """Whether the last validation is better than at every step before; that before step 1
        aside."""
        known = [line.get("val/success") for line in self.history if line["step"] > 0]
        *before, last = [-1.0, *(-1.0 if v is None else v for v in known)]  # None: not finite
        return last > max(before, default=-1.0)

    def write(self, metrics):
        """Append the metrics to metrics.jsonl, rounded; print the console line."""
        if not self.writes:
            return
        # JSON has no nan and no infinity.
        metrics = {k: None if isinstance(v, float) and not math.isfinite(v) else v
                   for k, v in metrics.items()}
        rounded = {k: round(v, 6) if isinstance(v, float) and abs(v) > 1e-3 else v
                   for k, v in metrics.items()}
        self.append("metrics.jsonl", [rounded])
        self.history.append(rounded)
        self.tell(rounded)
        tqdm.write(console_line(metrics, self.config))
        sys.stdout.flush()

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
            played = played[:SAMPLE // 2] + played[SAMPLE // 2:][-SAMPLE // 2:]
        else:
            played = [t for t in trajectories[::max(1, len(trajectories) // SAMPLE)]
                      if not t.error]
        self.append("trajectories.jsonl", [{
            "step": step, "split": split, "env": t.env, "seed": t.seed, "group": t.group_id,
            "member": t.member, "success": t.success, "stop": t.stop.value, "error": t.error,
            "turn_rewards": t.turn_rewards, "messages": t.messages(), **images_of(t),
            "replies": replies(t, self.tokenizer)} for t in played[:SAMPLE] + failed[:SAMPLE]])
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
             "no_update": "" if metrics.get("groups_kept") else ", no update",
             "val/success_greedy": math.nan, "test/success_greedy": math.nan, **metrics}
    return "  ".join(part.format(known[name], **known) for name, part in CONSOLE.items()
                      if known.get(name) is not None)  # a number that is not finite is None


# ---- Checkpoints ---------------------------------------------------------------------------------
def save_checkpoint(folder, learner, best=False):
    """Write a plain Hugging Face folder plus trainer state beside, flush it, rename it into place.

    A kill at any instant, also of the machine, leaves a whole checkpoint: the manifest is written
    last, and older checkpoints stay until then. `checkpoint.old` is the one before; `best`: this
    one is kept as `checkpoint.best`, too.

    raises: OSError, for example for a full disk. The checkpoints of before are then still whole
    """
    current, new, old, kept = (folder / f"checkpoint{end}" for end in ("", ".new", ".old", ".best"))
    # Finish the renames of a save that was killed.
    if not current.exists() and (new / "manifest.json").exists():
        new.rename(current)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()  # not its parents: a run whose folder is gone must not begin another
    try:
        write_files(new, learner)
        if current.exists():
            shutil.rmtree(old, ignore_errors=True)
            current.rename(old)
        new.rename(current)
        if best:
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(current, kept, copy_function=link_or_copy)
        flush(folder)
    except (OSError, RuntimeError) as problem:  # torch.save raises the latter for a full disk
        shutil.rmtree(new, ignore_errors=True)
        raise OSError(str(problem).partition("\n")[0]) from None


def write_files(new, learner):
    """The files of a checkpoint, last of them the manifest: step, versions, sizes and checksums.

    The model before RL never changes, so it stands once, beside the checkpoints.
    """
    policy = learner.policy
    policy.save(new)
    critic = learner.critic and {"model": lora.trained(learner.critic),
                                 "optimizer": learner.critic_optimizer.state_dict()}
    torch.save({**{name: getattr(learner, name) for name in COUNTERS},
                "adapters": policy.base and lora.trained(policy.model),
                "optimizer": learner.optimizer.state_dict(), "critic": critic},
               new / "trainer.pt")
    paths = sorted(new.iterdir())
    if (first := policy.base or learner.reference and learner.reference.model) is not None:
        reference = new.parent / "reference.pt"
        if not reference.exists():
            torch.save(first.state_dict(), new / "reference.part")
            flush(new / "reference.part")
            (new / "reference.part").rename(reference)
        paths.append(new / ".." / reference.name)
    for path in paths:
        flush(path)
    write_whole(new / "manifest.json", json.dumps(
        {"step": learner.step, "versions": versions(),
         "files": {os.path.relpath(p, new): checksum(p) for p in paths}}, indent=1))
    flush(new)


def link_or_copy(path, other):
    """The same file under another name; a copy where the file system has no such links."""
    try:
        os.link(path, other)
    except OSError:
        shutil.copy2(path, other)


def checksum(path):
    """[size in bytes, SHA-256] of a file, read piece by piece."""
    with open(path, "rb") as file:
        return [os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def flush(path):
    """Have the disk hold a file, or the names in a folder: a power cut cannot take them back."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def versions():
    return {"torch": torch.__version__, "transformers": transformers.__version__}


def find_checkpoint(folder, say=print, only=""):
    """The newest whole checkpoint of a run: `checkpoint`, or if it is damaged or missing, which is
    printed, the one before, or else the best. Raises ValueError if none is whole.

    only: "best": no other one
    """
    # A save killed between its renames leaves no `checkpoint` but a whole `checkpoint.new`.
    paths = [folder / f"checkpoint{end}" for end in ("", ".new", ".old", ".best")]
    problems = []
    for path in (p for p in paths if (p / "manifest.json").exists() and p.name.endswith(only)):
        if problem := damage(path):
            problems.append(f"{problem} has changed")
            continue
        if problems or not only and path in paths[2:]:
            lacks = "has no manifest.json" if paths[0].exists() else "is missing"
            why = [*problems, f"{paths[0]} {lacks}"][0]
            say(f"warning   {why}: going on from {path.name} of step {step_of(path)}")
        return path
    again = f"{folder.name}-again"
    advice = ("Leave out --checkpoint: there is another one."
              if only and (paths[0] / "manifest.json").exists() else
              f"It was trained again: take RUN={again}."
              if (folder.parent / again / "checkpoint").exists() else
              f"Train it again with: make reproduce RUN={folder.name}")
    if problems:
        raise ValueError(f"checkpoint is damaged: {problems[0]}. Restore the file. {advice}")
    if not (folder / "config.json").exists():
        load_config(folder.name)  # names the runs that there are
    kind = f"{only} checkpoint".strip()
    raise ValueError(f"{folder} has no {kind}: its weights are not here. {advice}")


def step_of(checkpoint):
    """The step of a whole checkpoint."""
    return json.loads((checkpoint / "manifest.json").read_text())["step"]


def damage(checkpoint):
    """The first file that is not as the manifest says, or "" if all are."""
    try:
        expected = dict(json.loads((checkpoint / "manifest.json").read_text())["files"])
    except (ValueError, TypeError, KeyError):
        return checkpoint / "manifest.json"
    for file in {"config.json", "model.safetensors", "trainer.pt", *expected}:
        path = checkpoint / file
        if not path.is_file() or checksum(path) != expected.get(file):
            return path
    return ""


def load_trainer_state(checkpoint, learner):
    """Fill in all of a Learner but the policy's weights, which are already loaded. Returns what
    differs between the packages that wrote the checkpoint and these, or ""."""
    def load(path, device):  # weights_only: nothing in a file is executed
        return torch.load(path, map_location=device, weights_only=True)

    state = load(checkpoint / "trainer.pt", learner.policy.device)
    for name in COUNTERS:
        setattr(learner, name, state[name])
    learner.optimizer.load_state_dict(state["optimizer"])
    if learner.critic:
        lora.load(learner.critic, state["critic"]["model"])
        learner.critic_optimizer.load_state_dict(state["critic"]["optimizer"])
    if learner.policy.base:
        lora.load(learner.policy.model, state["adapters"])
    if (first := learner.policy.base or learner.reference and learner.reference.model) is not None:
        # Not by way of the GPU, which may have no room for a second model.
        first.load_state_dict(load(checkpoint.parent / "reference.pt", "cpu"))
    then = json.loads((checkpoint / "manifest.json").read_text()).get("versions", {})
    return ", ".join(f"{name} was {then.get(name, 'unknown')}, is {now}"
                     for name, now in versions().items() if then.get(name) != now)


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
    """The Config of runs/RUN, with the name that the folder has now. Raises ValueError also for a
    folder that another has made so that we write elsewhere, or import what is in it."""
    folder = RUNS / run
    if not (RUN_NAME.fullmatch(run) and (folder / "config.json").exists()):
        known = sorted(p.parent.name for p in RUNS.glob("*/config.json"))
        own = [name for name in known if not name.startswith(("readme-", "findings-"))]
        others = difflib.get_close_matches(run, known)  # also of those that the project stores
        raise ValueError(nearest("run", run, [*dict.fromkeys(own + others)] or known))
    shared = RUNS / "figures"  # of a page about several runs
    for path in (folder, *folder.rglob("*"), shared, *shared.glob("*")):
        if path.is_symlink():
            raise ValueError(f"{path} is a symbolic link, so files could be written elsewhere. "
                             f"Replace it by what it points to.")
    config = dataclasses.replace(read_config(folder), run=run)
    if re.search(rf"(^|,)\s*{RUNS.name}\.", config.env):  # package.module:Class
        raise ValueError(f"{folder}/config.json names code in {RUNS}/: env {config.env!r}.")
    return config


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
