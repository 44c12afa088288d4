"""Write a run's metrics to TensorBoard and Weights & Biases as well: `--log tensorboard,wandb`.

Their files are in runs/NAME/tensorboard and runs/NAME/wandb. A resumed run writes them again from
metrics.jsonl, so no step is there twice, whatever a kill has left. W&B is offline unless the
variable WANDB_MODE says otherwise; online, it keeps the steps that it has. WANDB_PROJECT and its
other variables work, too.

Tests: `python -m pytest tests/test_loggers.py`.
"""

import importlib.util
import json
import os
import secrets
import shutil

from minragen.support.options import nearest


def tensorboard(folder, config):
    """Open a SummaryWriter. Returns write(metrics), which skips texts."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder / "tensorboard", purge_step=0)  # viewers drop earlier writes
    writer.add_text("config", f"```\n{json.dumps(vars(config), indent=1)}\n```")

    def write(metrics):
        for name, value in metrics.items():
            if isinstance(value, int | float):
                writer.add_scalar(name, value, metrics["step"])
        writer.flush()

    return write


def wandb(folder, config):
    """Open a W&B run that keeps its id and ends with Python. Returns write(metrics)."""
    import wandb

    home = folder / "wandb"
    home.mkdir(exist_ok=True)
    if not (home / "id").exists():
        (home / "id").write_text(secrets.token_hex(4), "utf-8")
    for part in home.glob("offline-run-*"):
        shutil.rmtree(part)
    mode = os.environ.get("WANDB_MODE", "offline")
    run = wandb.init(
        id=(home / "id").read_text("utf-8"), name=folder.name, dir=folder, mode=mode,
        config=vars(config), project=os.environ.get("WANDB_PROJECT", "minragen"),
        reinit="finish_previous", resume="allow" if mode == "online" else None,
        settings=wandb.Settings(quiet=True, symlink=False))  # run/runs.py refuses links

    def write(metrics):  # None stands for what is not finite
        run.log({k: v for k, v in metrics.items() if v is not None}, step=metrics["step"])

    return write


LOGGERS = {"tensorboard": tensorboard, "wandb": wandb}


def names(log):
    """The loggers that the option `log` names, each once."""
    return list(dict.fromkeys(name.strip() for name in log.split(",") if name.strip()))


def check(log):
    """Raise ValueError for a name that is no logger, ImportError for a package that is missing."""
    for name in names(log):
        if name not in LOGGERS:
            raise ValueError(nearest("log", name, list(LOGGERS)))
        if importlib.util.find_spec(name) is None:
            raise ImportError(f"--log {name} needs a package: pip install {name}")


def start(folder, config, history):
    """Open the loggers of a Config and write the history to them. Returns a function that writes
    one step.

    raises: RuntimeError if a logger does not open
    """
    writers = []
    for name in names(config.log):
        try:
            writers.append(LOGGERS[name](folder, config))
        except Exception as problem:  # those of the libraries have no class in common
            said = str(problem).strip().splitlines() or [type(problem).__name__]
            raise RuntimeError(f"--log {name}: {said[0]}") from None

    def write_all(metrics):
        for write in writers:
            write(metrics)

    for metrics in history:
        write_all(metrics)
    return write_all
