"""The README's figure and tables, made from the files in runs/ and from nothing else.

    python -m benchmarks.figure      (or: make figure)

Reads runs/readme-*/metrics.jsonl, the committed runs, draws docs/learning.png and rewrites what
stands between `<!-- begin NAME -->` and `<!-- end NAME -->` in README.md. tests/test_readme.py
checks that the README says what this script would write.
"""

import json
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import environments
from minragen.config import read_config
from minragen.eval import wilson
from minragen.train import console_line

ROOT = Path(__file__).resolve().parent.parent
SEEDS = (0, 1, 2)
RUNS = (("frozenlake", "grpo"), ("frozenlake", "ppo"), ("bandit", "grpo"), ("sokoban", "grpo"),
        ("countdown", "grpo"), ("sudoku", "grpo"), ("searchqa", "grpo"), ("webshop", "grpo"))
COLOURS = ("tab:blue", "tab:orange", "tab:green")


def read(name):
    lines = (ROOT / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def curve(metrics, key):
    """[(step, value), ...] of the lines that have `key`."""
    return [(line["step"], line[key]) for line in metrics if key in line]


def draw(path):
    """Held-out success against step: FrozenLake with GRPO and with PPO, three seeds each."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for axis, algo in zip(axes, ("grpo", "ppo")):
        for seed, colour in zip(SEEDS, COLOURS):
            metrics = read(f"readme-frozenlake-{algo}-s{seed}")
            for key, style, label in (("val/success", "-", "sampled"),
                                      ("val/success_greedy", "--", "greedy")):
                axis.plot(*zip(*curve(metrics, key)), style, color=colour,
                          label=f"seed {seed}, {label}", marker=".")
        axis.set_title(f"FrozenLake, {algo.upper()}, tiny (0.2M parameters), one CPU core",
                       fontsize=9)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("success on 256 held-out maps")
    axes[0].set_ylim(0, 1)
    axes[1].legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def results_table():
    """One row per environment and algorithm: before RL, and what the seeds have at the preset's
    last step, with the 95 % interval of the lowest."""
    rows = ["| run | success before RL: sampled | greedy | after, seeds 0, 1, 2: sampled | greedy "
            "| return: before, after | test: success | minutes |",
            "|---|---|---|---|---|---|---|---|"]
    for env, algo in RUNS:
        runs = [read(f"readme-{env}-{algo}-s{seed}") for seed in SEEDS]
        config = json.loads((ROOT / "runs" / f"readme-{env}-{algo}-s0" / "config.json").read_text())
        last = [[line for line in run if "val/success" in line][-1] for run in runs]
        first, size = runs[0][0], config["val_size"]
        minutes = [run[-1]["elapsed"] / 60 for run in runs]
        rows.append("| " + " | ".join([
            f"{env} {algo}",
            with_interval(first["val/success"], size),
            with_interval(first["val/success_greedy"], size),
            of_seeds([line["val/success"] for line in last], size),
            of_seeds([line["val/success_greedy"] for line in last], size),
            f"{first['val/episode_return']:.2f}, "
            + " ".join(f"{line['val/episode_return']:.2f}" for line in last),
            ", ".join(f"{run[-1]['test/success']:.2f}" for run in runs),
            f"{min(minutes):.1f} to {max(minutes):.1f}"]) + " |")
    return "\n".join(rows)


def of_seeds(rates, n):
    low, high = wilson(round(min(rates) * n), n)
    return f"{', '.join(f'{rate:.2f}' for rate in rates)} [{low:.2f}, {high:.2f}]"


def with_interval(rate, n):
    low, high = wilson(round(rate * n), n)
    return f"{rate:.2f} [{low:.2f}, {high:.2f}]"


def written_into(readme, blocks):
    """The README's text with every named block replaced. Raises ValueError for a block that is not
    there."""
    for name, text in blocks.items():
        pattern = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
        if not re.search(pattern, readme, re.DOTALL):
            raise ValueError(f"there is no block called {name!r}.")
        readme = re.sub(pattern, lambda m, text=text: m[1] + text + "\n" + m[2], readme,
                        flags=re.DOTALL)
    return readme


def log_lines():
    """Console lines of the first GRPO run, printed again from its metrics by the function that
    printed them."""
    run = "readme-frozenlake-grpo-s0"
    config, metrics = read_config(ROOT / "runs" / run), read(run)
    last = config.steps
    chosen = [*metrics[:3], metrics[last // 2], *metrics[last:]]
    return "\n".join(["```text", *(console_line(line, config) for line in chosen), "```"])


def blocks():
    rows = json.loads(environments.STORED.read_text())
    return {"log": log_lines(), "results": results_table(),
            "environments": environments.table(rows)}


if __name__ == "__main__":
    (ROOT / "docs").mkdir(exist_ok=True)
    draw(ROOT / "docs" / "learning.png")
    path = ROOT / "README.md"
    path.write_text(written_into(path.read_text(), blocks()))
    print("wrote docs/learning.png and the tables of README.md")
