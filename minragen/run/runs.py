"""A run on disk: its folder, its checkpoints, and how it is resumed.

    runs/NAME/config.json          the Config
              metrics.jsonl        one line a step, with the names of docs/metrics.md
              trajectories.jsonl   a few episodes of every step: chat messages, sampled tokens
              checkpoint/          a plain Hugging Face folder plus trainer state
              checkpoint.old/      the one before; checkpoint.best/: the best in validation
              reference.pt         the model before RL, for LoRA or a KL; without LoRA the teacher
              teacher.pt           the teacher, with LoRA
              report.html          all of this on one page (look/report.py)
              errors.txt           tracebacks, if an environment or the run failed

Reading order: `run_folder`, `save_checkpoint`, `find_checkpoint`, `resumed_config`; last how a file
is written (`writing`). What a run writes while it trains is in log.py.

Tests: `python -m pytest tests/test_runs.py`.
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from tqdm import tqdm

from minragen.config import DATA, RUN_NAME, Config, check
from minragen.support.options import REMOVED, nearest, parse_options

RUNS = Path("runs")
KNOWN = {*vars(Config()), "data_files"}  # of config.json
# Fields of a Learner that a checkpoint stores as they are.
COUNTERS = ("step", "validation_due", "best_success", "ended", "empty_steps", "skipped", "rounds",
            "ema")
FREE_ON_RESUME = ("run", "steps", "max_context", "device", "max_rows", "feed_share",
                  "token_budget", "activation_checkpointing", "plain", "compile", "log")
VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__}
warn_once = functools.cache(tqdm.write)  # a command may read a config.json several times


def run_folder(config, resume):
    """The run's folder. An unnamed run gets a free name; a name that is taken is refused."""
    if config.run:
        folder = RUNS / config.run
        if folder.exists() and not resume:
            raise ValueError(f"run {config.run!r} exists already. Choose another name, or continue "
                             f"it with --run {config.run} --resume (make resume RUN={config.run}).")
        return folder
    env, model = config.env.replace(",", "+"), Path(config.model).name
    stem = re.sub(r"[^\w.+=-]+", ".", f"{env}-{config.algo}-{model}-s{config.seed}")
    names = (stem if i == 1 else f"{stem}-{i}" for i in range(1, 10**6))
    return next(RUNS / n for n in names if not (RUNS / n).exists())


@contextlib.contextmanager
def locked(folder):
    """Keep other processes from training this run, until this one ends, in whatever way.

    raises: ValueError naming the process that trains it
    """
    path = folder / "lock"
    with writing(path):
        path.touch()
    with open(path, encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"run {folder.name!r} is being trained by process {file.read()}. Wait "
                             f"for it, or stop it.") from None
        with contextlib.suppress(OSError):  # a full disk
            path.write_text(f"{os.getpid()}", "utf-8")
        yield


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
    new.mkdir()  # without parents: a run's folder that was deleted is not made again
    try:
        write_files(new, learner)
        if current.exists():
            shutil.rmtree(old, ignore_errors=True)
            current.rename(old)
        new.rename(current)
        if best:
            shutil.rmtree(kept, ignore_errors=True)
            try:
                shutil.copytree(current, kept, copy_function=os.link)
            except OSError:  # the file system has no such links
                shutil.copytree(current, kept, dirs_exist_ok=True)
        flush(folder)
    except (OSError, RuntimeError) as problem:  # torch.save raises the latter for a full disk
        shutil.rmtree(new, ignore_errors=True)
        raise OSError(f"cannot write {current}: " + str(problem).partition("\n")[0]) from None


def write_files(new, learner):
    """The files of a checkpoint, last of them the manifest: step, versions, sizes and checksums."""
    policy, trained = learner.policy, torch.nn.Module.state_dict
    if policy.base:
        from minragen.more.lora import trained
    save_policy(policy, new)
    critic = learner.critic and {"model": trained(learner.critic),
                                 "optimizer": learner.critic_optimizer.state_dict()}
    torch.save({**{name: getattr(learner, name) for name in COUNTERS},
                "adapters": policy.base and trained(policy.model),
                "optimizer": learner.optimizer.state_dict(), "critic": critic,
                "older_weights": getattr(learner.rollout_context, "kept", None)},
               new / "trainer.pt")
    paths = sorted(new.rglob("*"))  # some tokenizers save folders
    for name, model in frozen(learner).items():
        if not (new.parent / name).exists():
            torch.save(model.state_dict(), new / "frozen.part")
            flush(new / "frozen.part")
            (new / "frozen.part").rename(new.parent / name)
        paths.append(new / ".." / name)
    for path in paths:
        flush(path)
    write_whole(new / "manifest.json", json.dumps(
        {"step": learner.step, "versions": VERSIONS, "commit": commit(),
         "files": {os.path.relpath(p, new): checksum(p) for p in paths if p.is_file()}}, indent=1))
    flush(new)


@functools.cache
def commit():
    """The commit of this checkout, with "-dirty" if its files differ from it; "" without git."""
    root = Path(__file__).parents[2]
    if not ((root / ".git").exists() and shutil.which("git")):
        return ""
    return subprocess.run(["git", "-C", root, "describe", "--always", "--dirty"], check=False,
                          capture_output=True, encoding="utf-8").stdout.strip()


def commit_of(folder):
    """The commit that saved a run's last checkpoint; "" if it is not known."""
    with contextlib.suppress(Exception):  # there may be none, or anything
        stored = json.loads((folder / "checkpoint" / "manifest.json").read_bytes())
        return str(stored.get("commit", ""))[:99]
    return ""


def checksum(path):
    """[size in bytes, SHA-256] of a file, read piece by piece."""
    with open(path, "rb") as file:
        return [os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def find_checkpoint(folder, say=print, only=""):
    """The newest whole checkpoint of a run: `checkpoint`, or if it is damaged or missing, which is
    printed, the one before, or else the best. Raises ValueError if none is whole.

    only: "best": no other one
    """
    # A save killed between its renames leaves no `checkpoint` but a whole `checkpoint.new`.
    paths = [folder / f"checkpoint{end}" for end in ("", ".new", ".old", ".best")]
    problems = []
    refuse_links(folder)
    for path in (p for p in paths if (p / "manifest.json").exists() and p.name.endswith(only)):
        if problem := damage(path):
            problems.append(f"{problem} is missing or has changed")
            continue
        if problems or not only and path in paths[2:]:
            why = problems[0] if problems else f"there is no whole {paths[0]}"
            say(f"warning   {why}: going on from {path.name} of step {step_of(path)}")
        return path
    advice = ("Leave out --checkpoint: there is another one."
              if only and (paths[0] / "manifest.json").exists() else
              f"Train it again: make reproduce RUN={folder.name}, or as another run.")
    if problems:
        raise ValueError(f"checkpoint is damaged: {problems[0]}. Restore the file. {advice}")
    if not (folder / "config.json").exists():
        load_config(folder.name)  # raises, with the names of all runs
    kind = f"{only} checkpoint".strip()
    raise ValueError(f"{folder} has no {kind}: its weights are not here. {advice}")


def step_of(checkpoint):
    """The step of a whole checkpoint."""
    return json.loads((checkpoint / "manifest.json").read_text("utf-8"))["step"]


def damage(checkpoint):
    """The first file that is not as the manifest says, or "" if all are."""
    try:
        expected = dict(json.loads((checkpoint / "manifest.json").read_text("utf-8"))["files"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return checkpoint / "manifest.json"
    for file in {"config.json", "model.safetensors", "trainer.pt", *expected}:
        path = checkpoint / file
        if not path.is_file() or checksum(path) != expected.get(file):
            return path
    return ""


def frozen(learner):
    """{file: model} of what training needs and never changes: it stands beside the checkpoints."""
    base, reference = learner.policy.base, learner.reference and learner.reference.model
    models = dict.fromkeys(model for model in (base, reference) if model is not None)  # distinct
    return dict(zip(("reference.pt", "teacher.pt"), models))


def load_trainer_state(checkpoint, learner):
    """Fill in a Learner: LoRA's adapters, and all but the policy's weights, which are loaded."""
    load = functools.partial(torch.load, weights_only=True)  # nothing in a file is executed
    state = load(checkpoint / "trainer.pt", learner.policy.device)
    for name in state.keys() & COUNTERS:  # older checkpoints have fewer
        setattr(learner, name, state[name])
    learner.optimizer.load_state_dict(state["optimizer"])
    fill = torch.nn.Module.load_state_dict
    if learner.policy.base:
        from minragen.more.lora import load as fill

        fill(learner.policy.model, state["adapters"])
    if learner.critic:
        fill(learner.critic, state["critic"]["model"])
        learner.critic_optimizer.load_state_dict(state["critic"]["optimizer"])
    if state.get("older_weights"):
        learner.rollout_context.kept = state["older_weights"]
    for name, model in frozen(learner).items():
        # Not by way of the GPU, which may have no room for a second model.
        model.load_state_dict(load(checkpoint.parent / name, "cpu"))


# ---- Resuming ------------------------------------------------------------------------------------
def resumed_config(given):
    """The run's own Config with the given options, which may only be those of FREE_ON_RESUME."""
    stored = load_config(given["run"])
    check_files(stored)
    refuse_lost_options(given["run"])
    for name, value in given.items():
        if name not in FREE_ON_RESUME and value != getattr(stored, name):
            raise ValueError(f"--resume keeps the run's settings: {name} was "
                             f"{getattr(stored, name)!r}, got {value!r}. Start a new run.")
    config = dataclasses.replace(stored, **given)
    for name in ("max_context", "steps"):
        if getattr(config, name) < getattr(stored, name):
            raise ValueError(f"--resume cannot reduce {name}: it was {getattr(stored, name)}, got "
                             f"{getattr(config, name)}.")
    check(config)
    return config


def lines_until(step, path):
    """A file's lines up to `step`, without those of the final test."""
    return [line for line in read_lines(path)[0] if line["step"] <= step and not (
        line.get("split") == "test" or any(name.startswith("test/") for name in line))]


def read_lines(path, needed=()):
    """A file's JSON objects with a step and the keys `needed`, and the number of other lines: a
    kill may have cut one off, or it is being written. A missing file counts as empty."""
    texts = path.read_text("utf-8", "replace").splitlines() if path.is_file() else []
    lines = []
    for text in texts:
        with contextlib.suppress(ValueError, AttributeError, RecursionError):
            line = json.loads(text)
            if line.keys() >= {"step", *needed} and isinstance(line["step"], int):
                lines.append(line)
    return lines, len(texts) - len(lines)


def data_files(texts):
    """{environment option: `checksum`} of the options that bring a file of the user."""
    return {name: checksum(value) for name, value in parse_options(texts).items()
            if name.rpartition(".")[2] in (*DATA, "instructions")
            and isinstance(value, str) and os.path.isfile(value)}


def check_files(config):
    """Raise ValueError unless a run's data files have the content with which it was stored."""
    stored = json.loads((RUNS / config.run / "config.json").read_text("utf-8"))
    values, found = parse_options(config.env_arg), data_files(config.env_arg)
    for name, content in stored.get("data_files", {}).items():
        if found.get(name) != content:
            why = "its content differs" if name in found else "there is no such file"
            raise ValueError(f"run {config.run!r}: {name} is {values.get(name)!r}: {why}. Put the "
                             f"original file back.")


def load_config(run):
    """The Config of runs/RUN, with the name that the folder has now. Raises ValueError also for a
    folder that somebody made so that we would write elsewhere, or import its code."""
    folder = RUNS / run
    if not (RUN_NAME.fullmatch(run) and (folder / "config.json").exists()):
        known = sorted(p.parent.name for p in RUNS.glob("*/config.json"))
        raise ValueError(nearest("run", run, known))
    refuse_links(folder)
    config = dataclasses.replace(read_config(folder), run=run)
    for text in (config.env, config.algo, *config.layer):  # package.module:Class
        if re.search(rf"(^|,)\s*{RUNS.name}[.:]", text):
            raise ValueError(f"{folder}/config.json names code in {RUNS}/: {text!r}.")
    return config


def refuse_links(folder):
    """Raise ValueError for links (writes would go elsewhere), pipes and devices (reads hang)."""
    for path in (folder, *folder.rglob("*")):
        try:
            found = path.lstat()
        except FileNotFoundError:  # a run that trains has just renamed it
            continue
        if stat.S_ISLNK(found.st_mode):
            raise ValueError(f"{path} is a symbolic link, so files could be written elsewhere. "
                             f"Replace it by what it points to.")
        linked = path.name in ("lock", "errors.txt") and found.st_nlink > 1
        if linked or not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            raise ValueError(f"{path} is {'hard-linked' if linked else 'no file'}. Remove it.")


def read_config(folder):
    """The Config in folder/config.json. Raises ValueError if there is no valid one. Options that
    this version lacks are left out, with a warning if they were on."""
    try:
        stored = json.loads((folder / "config.json").read_text("utf-8")[:2**16])  # none is longer
        if not (isinstance(stored, dict) and isinstance(stored.pop("data_files", {}), dict)):
            raise TypeError("expected an object of options")
        if not stored.get("kl_coef"):  # without a KL it has no effect; its default was k3
            stored["kl_estimator"] = Config.kl_estimator
        if lost := lost_options(stored):
            warn_once(f"warning   {folder}/config.json has options that this version lacks, which "
                      f"are left out: {' '.join(', '.join(lost).split())[:200]}")
        config = Config(**{name: tuple(value) if isinstance(value, list) else value
                           for name, value in stored.items() if name in KNOWN})
        for f in dataclasses.fields(config):
            value = getattr(config, f.name)
            texts = value if isinstance(value, tuple) else ()
            if not (isinstance(value, (int, float) if f.type is float else f.type)
                    and isinstance(value, bool) == (f.type is bool)
                    and all(isinstance(text, str) for text in texts)):
                raise TypeError(f"{f.name} is {value!r}")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder}/config.json cannot be read: {error}.") from None
    return config


def lost_options(stored):
    """{name: value} of the options in a config.json that were on and that this version lacks. Off
    is 0, false or empty; of those in removed.toml the values listed there, or any if none is."""
    return {name: value for name, value in stored.items() if name not in KNOWN and (
        value not in (REMOVED[name][0] or [value]) if name in REMOVED else value)}


def refuse_lost_options(run):
    """Raise ValueError if a run had an option on that this version lacks: it cannot be trained."""
    stored = json.loads((RUNS / run / "config.json").read_text("utf-8"))
    for name, value in lost_options(stored).items():
        now = f"; instead: {REMOVED[name][1]}" if name in REMOVED else ""
        raise ValueError(f"run {run!r} had {name}={value!r:.200}, which this version lacks{now}. "
                         f"Its commit can continue it: {commit_of(RUNS / run) or 'not known'}.")


# ---- How a file is written -----------------------------------------------------------------------
@contextlib.contextmanager
def writing(path):
    """While a file of a run is written: turn any OSError (the disk is full) into one sentence."""
    try:
        yield
    except OSError as problem:
        raise OSError(f"{path}: {problem.strerror}") from None


def write_whole(path, text):
    """Write beside and rename, so that a kill leaves the old file or the new one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # another process may write it, too
    with writing(path):
        try:
            part.write_text(text, encoding="utf-8", errors="replace")
            flush(part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def save_policy(policy, folder):
    """`policy.save`. Raises OSError if it cannot be written, for example for a full disk."""
    try:
        policy.save(folder)
    except Exception as problem:  # tokenizers raises Exception, safetensors SafetensorError
        if type(problem) is Exception or isinstance(problem, SafetensorError):
            raise OSError(str(problem)) from problem
        raise


def flush(path):
    """fsync a file, or a folder's entries, so that a power cut cannot undo the write."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
