"""The figures and the tables of README.md and docs/, made from lab/results/.

    python -m lab.figure      (or: make figure)

Draws docs/learning.png and docs/pretrained.png from the stored runs (archive.py), and
docs/boards.png, the images of FrozenLake and Sokoban. algorithm.py draws step.png and row.png, for
which a step of a stored run is made again, and pictures.py loop.png, memory.png, collapse.png and
code.png. In each page of `PAGES` it rewrites the blocks from `<!-- begin NAME -->` to
`<!-- end NAME -->`, and the episode below each `python -m minragen environments NAME SEED`.
It makes a notebook of each page of docs/course. tests/test_readme.py checks that the pages and the
notebooks say what this script would write.
"""

import base64
import csv
import inspect
import json
import re
import textwrap
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from lab import algorithm, archive, environments, gpu, leaderboard, pictures, pretrained, tokens
from lab.environments import table, with_interval
from minragen.environments.board import read_tiles
from minragen.envs import REGISTRY, make
from minragen.look.evaluate import changed_environment
from minragen.look.intervals import wilson
from minragen.look.play import transcript
from minragen.run.bundled import demonstration_groups
from minragen.run.groups import env_groups
from minragen.run.log import console_line
from minragen.support.formats import forced_prefix

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "lab" / "results"  # measured at commits that are named there
SEEDS = (0, 1, 2)
FIRST = "frozenlake-grpo-s0"  # the run whose episode and first step the pages show
COLOURS = ("#0072B2", "#E69F00", "#009E73")  # Okabe and Ito's: the colour-blind tell them apart
EPISODE = re.compile(
    r"(```console\n\$ \.venv/bin/python -m minragen environments (\w+) (\d+)\n).*?(^```$)",
    re.DOTALL | re.MULTILINE)
COURSE = sorted((ROOT / "docs" / "course").glob("*.md"))
# The first cell of each notebook.
INSTALL = """\
import importlib.util, os
if os.path.exists("../../minragen/train.py"):  # this notebook lies in its checkout
    os.chdir("../..")
if not importlib.util.find_spec("minragen"):
    raise SystemExit("minRAGEN is not installed. Run in a cell: %pip install PATH/TO/minragen")"""
# A Python block of a chapter, and below it what it prints, which may be folded away.
BLOCK = re.compile(r"""^```python\n(.*?)^```\n
                       ((?:<details><summary>Output</summary>\n\n)?
                        ```text\n(.*?)^```\n
                        (?:</details>\n)?)?""", re.DOTALL | re.MULTILINE | re.VERBOSE)


def curve(metrics, key):
    """[(step, value), ...] of the lines that have `key`."""
    return [(line["step"], line[key]) for line in metrics if key in line]


def draw(path):
    """Held-out success against step in each environment: three seeds, and two baselines."""
    figure, grid = plt.subplots(2, 5, figsize=(11, 4.8), sharey=True, layout="constrained")
    for axis, env in zip(grid.flat, REGISTRY):
        runs, last, _ = runs_of(env)
        for seed, (metrics, colour) in enumerate(zip(runs, COLOURS)):
            axis.plot(*zip(*curve(metrics, "val/success")), color=colour, marker=".",
                      label=f"seed {seed}")
        random, *shallow, _ = baselines(env).values()
        axis.axhline(max(shallow), color="black", linestyle="--", lw=1, label="best shallow player")
        axis.axhline(random, color="gray", linestyle=":", lw=1, label="random policy")
        axis.set_title(env, fontsize=11)
        axis.set_xticks([0, last[0]["step"]])
        axis.grid(alpha=0.3)
    for axis in grid[:, 0]:
        axis.set_ylabel("held-out success", fontsize=11)
    for axis in grid[1]:
        axis.set_xlabel("training step", fontsize=11)
    grid[0, 0].set_ylim(-0.02, 1.02)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncol=5,
                  fontsize=11, frameon=False)
    algorithm._save(figure, path)


def draw_pretrained(path):
    """Success in training against minutes of it, and that of the validations: a panel for each
    recipe, with the same runs under a random reward in gray; and one for the runs of gpu.json."""
    count = len(recipes()) + 1
    figure, axes = plt.subplots(1, count, figsize=(4 * count, 3), squeeze=False,
                                layout="constrained")
    for axis, name in zip(axes[0], recipes()):
        for run in archive.names(f"{name}*-s?"):
            lines, random = archive.metrics(run), "-random-" in run
            minutes = np.cumsum([0] + [value for _, value in curve(lines, "seconds")]) / 60
            colour = "lightgray" if random else COLOURS[archive.config(run).seed]
            axis.plot(minutes[1:], [value for _, value in curve(lines, "success")], ".",
                      color=colour, zorder=-random)
            axis.plot(minutes[[0, -1]], [value for _, value in curve(lines, "val/success")],
                      "o-", color=colour, zorder=-random, label="random reward" * random or
                      f"seed {archive.config(run).seed}")
        axis.set(title=archive.config(f"{name}-s0").env, xlabel="minutes of training on one core",
                 ylim=(0, 1))
        axis.grid(alpha=0.3)
    for run in json.loads(gpu.STORED.read_text())["smollm2 in bandit"]["seeds"]:
        minutes = np.cumsum([0, *run["seconds"]]) / 60
        axes[0, -1].plot(minutes[1:], run["success"], ".", color="black", alpha=0.15)
        axes[0, -1].plot(minutes[::50], run["val/success"], "o-", color="black")
    axes[0, -1].set(title="bandit (one turn), five seeds", ylim=(0, 1),
                    xlabel="minutes of training on an H200")
    axes[0, -1].grid(alpha=0.3)
    axes[0, 0].set_ylabel("success")
    axes[0, 0].plot([], [], ".", color="black", label="a batch in training")
    axes[0, 0].plot([], [], "o-", color="black", label="held-out instances")
    handles = {}
    for axis in axes[0]:
        handles |= dict(zip(*axis.get_legend_handles_labels()[::-1]))
    figure.legend(handles.values(), handles, loc="outside upper center", ncol=6, fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_boards(path):
    """A board of FrozenLake and one of Sokoban as `view=image` shows them, beside their tiles."""
    figure, axes = plt.subplots(1, 4, figsize=(8, 2.5), width_ratios=(6, 1, 6, 1),
                                layout="constrained")
    for name, board, legend in zip(("frozenlake", "sokoban"), axes[::2], axes[1::2]):
        env = make(name, view="image")
        image = env.reset(seed=3)[0].image
        apart = ((0, 0), (0, 2), (0, 0), (0, 0))  # two rows of white below each tile
        tiles = np.pad(read_tiles(env.tiles, 8), apart, constant_values=255)
        for axis, pixels in ((board, image), (legend, np.vstack(tiles))):
            axis.imshow(pixels, interpolation="nearest")
            axis.set(xticks=[], yticks=[], frame_on=False)
        legend.set_yticks(range(4, 10 * len(tiles), 10), env.meanings, fontsize=8)
        legend.yaxis.tick_right()
        legend.tick_params(length=0)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def runs_of(env):
    """The metrics of the three seeds, their lines of the last validation, and its size. env: the
    middle of the runs' names"""
    names = [f"{env}-grpo-s{seed}" for seed in SEEDS]
    runs = list(map(archive.metrics, names))
    return (runs, [[line for line in run if "val/success" in line][-1] for run in runs],
            archive.config(names[0]).val_size)


def results_table():
    """One row per environment: before RL, and what the seeds have at the preset's last step, with
    the 95 % interval of the worst seed and the mean of their tests, beside the best shallow player.
    """
    return table(("environment and options", "before RL", "after RL, seeds 0, 1, 2",
                  "test split, mean", "best shallow player", "turns before RL, after", "minutes"), [
        [named(env), f"{runs[0][0]['val/success']:.2f}",
         of_seeds([line["val/success"] for line in last], size),
         f"{np.mean([run[-1]['test/success'] for run in runs]):.2f}", f"{max(shallow):.2f}",
         ", ".join(f"{np.mean([line['turns'] for line in step]):.1f}"
                   for step in ([run[1] for run in runs], [run[-2] for run in runs])),
         minutes(runs)]
        for env in REGISTRY for runs, last, size in [runs_of(env)]
        for _, *shallow, _ in [baselines(env).values()]])


def pretrained_table():
    """One row for each stored run of a recipe of SmolLM2: its first and its last validation."""
    rows = []
    for run in (run for name in recipes() for run in archive.names(f"{name}-s?")):
        row = row_of(run)
        low, high = row["after - before"]
        rows.append([
            run.removeprefix("smollm2-"),
            *("{:.2f} [{:.2f}, {:.2f}]".format(*row[when]) for when in ("before", "after")),
            f"{low:+.2f} to {high:+.2f}", f"{row['valid before']:.2f}, {row['valid after']:.2f}",
            str(row["steps"]), f"{row['minutes']:.0f}"])
    return table(("environment and seed", "before", "after", "after - before",
                  "valid replies before, after", "steps", "minutes of training"), rows)


def row_of(run):
    return pretrained.row_of(archive.config(run), archive.metrics(run))


def control_line():
    """What the runs of the control with random rewards gain."""
    rows = [row_of(run) for run in archive.names("smollm2-lean-random-s?")]
    before, after = ([f"{row[when][0]:.2f}" for row in rows] for when in ("before", "after"))
    most = max(row["after - before"][1] for row in rows)
    return (f"With random rewards (`smollm2-lean-random`) success in Lean falls from "
            f"{', '.join(before)} to\n{', '.join(after)}; every interval puts the fall at "
            f"{-most:.2f} or more.")


def pretrained_means():
    """What an owner of a laptop gains: one row for each recipe, the mean of its seeds."""
    rows = []
    for name in recipes():
        runs = archive.names(f"{name}-s?")
        config = archive.config(runs[0])
        before, after = ([row_of(run)[when][0] for run in runs] for when in ("before", "after"))
        took = [sum(line.get("seconds", 0) for line in archive.metrics(run)) / 60 for run in runs]
        rows.append([
            f"`make train ENV={config.env} MODEL=smollm2`", f"{np.mean(before):.2f}",
            ", ".join(f"{rate:.2f}" for rate in after), str(config.val_size),
            f"{min(took):.0f} to {max(took):.0f}" if len(took) > 1 else f"{took[0]:.0f}"])
    return table(("command", "success after imitation, mean", "after RL, seed by seed",
                  "held-out instances", "minutes on one CPU core"), rows)


def recipes():
    """The names of the recipes of SmolLM2 that have stored runs."""
    return [name for name in pretrained.SMOLLM2 if archive.names(f"{name}-s?")]


def recipe_cards():
    """One row for each recipe: what it sets."""
    rows = []
    for name in recipes():
        config = archive.config(f"{name}-s0")
        groups = demonstration_groups(SimpleNamespace(name="smollm2"), partial(env_groups, config))
        rows.append([
            config.env, config.response_format, f"{config.warmup_steps * len(groups)}",
            f"{config.num_groups} x {config.group_size}", str(config.steps), f"{config.lr:g}",
            str(config.max_new_tokens), str(groups.envs[0].budget.max_turns)])
    return table(("environment", "format", "demonstrations", "groups x episodes", "steps",
                  "learning rate", "tokens a reply", "turns"), rows)


def start_line(run):
    """What the console said of a run's start, from the metrics of its first step."""
    config, line = archive.config(run), archive.metrics(run)[1]
    return "\n".join(["```text", (
        f"start     before the first update: valid replies {line['valid']:.2f}, success "
        f"{line['success']:.2f}, groups with different returns "
        f"{config.num_groups - line['groups_zero_std']} of {config.num_groups}"), "```"])


def lora_table(steps=60):
    """FrozenLake with LoRA and with all weights: held-out success after so many steps."""
    rows = []
    for trained, stem in (("rank 8", "lora-r8"), ("rank 64, as wide as the model", "lora-r64"),
                          ("all weights", "frozenlake-grpo")):
        names = archive.names(f"{stem}-s?")
        rates = [dict(curve(archive.metrics(run), "val/success"))[steps] for run in names]
        config = archive.config(names[0])
        seeds = ", one seed" if len(names) == 1 else ""
        rows.append([trained + seeds, f"{config.lr:g}", of_seeds(rates, config.val_size)])
    return table(("trained", "learning rate", "seed by seed, interval of the worst"), rows)


def vision_table():
    """What the seeds of tiny-vlm have before and after RL, and with the images of other maps; last
    a control that was trained on those."""
    measured = json.loads((ROOT / "lab" / "results" / "vision.json").read_text())
    others = {line["run"]: line["success"] for line in measured if line["env"] != "frozenlake"}
    rows = []
    for env in ("frozenlake-image", "sokoban-image", "frozenlake-shuffled"):
        runs, last, size = runs_of(env)
        shown = [rate for run, rate in others.items() if run.startswith(f"{env}-grpo")]
        rows.append([named(env), with_interval(runs[0][0]["val/success"], size),
                     of_seeds([line["val/success"] for line in last], size),
                     of_seeds([run[-1]["test/success"] for run in runs], size),
                     of_seeds(shown, size) if shown else "", minutes(runs)])
    return table(("environment and options", "validation before RL",
                  "validation after RL, seeds 0, 1, 2", "test after RL",
                  "test, images of other boards", "minutes"), rows)


def warnings_told():
    """How often any warning came, over the runs of commit 3f4b272."""
    rows = [row for row in csv.reader((RESULTS / "warnings.csv").read_text("utf-8").splitlines())
            if row[1] == "any"]

    def total(*columns):
        counts = [row[column].split(" of ") for row in rows for column in columns]
        return " of ".join(str(sum(map(int, numbers))) for numbers in zip(*counts))

    warned, lost = total(2).split(" of ")
    return (f"Of the stored runs of commit 3f4b272, {lost} lost a quarter of their success; "
            "perhaps half of these falls are noise.\n"
            f"{warned} had a warning in the first third of the fall or before it; {total(6, 7)} "
            "other runs had one.")


def named(env):
    """An environment with the options that its run had."""
    return ", ".join([archive.config(f"{env}-grpo-s0").env, *options_of(env)])


def options_of(env):
    return changed_environment(archive.config(f"{env}-grpo-s0"))


def baselines(env):
    """{player: success} in the environment as tiny's preset has it."""
    row = [row for row in json.loads(environments.STORED.read_text()) if row["env"] == env][-1]
    return {player: successes / row["size"] for player, successes in row["players"].items()}


def learnt(run):
    """The last stored instance that a run failed at its first validation and solves at its last:
    what it shows first, and the replies at both."""
    prefix, at = forced_prefix(archive.config(run).response_format), {}  # seed -> episodes
    for e in archive.episodes(run):
        at.setdefault(e["seed"], []).append(e)
    *_, (before, after) = [both for both in at.values() if [e["success"] for e in both] == [0, 1]]
    said = [before["messages"][1]["content"]]
    for when, episode in (("before RL", before), ("after RL", after)):
        said += ["", f"{when}:", *(f"> {prefix}{message['content']}" for message
                                   in episode["messages"] if message["role"] == "assistant")]
    return "\n".join(["```text", *said, "```"])


def minutes(runs):
    taken = sorted({f"{run[-1]['elapsed'] / 60:.1f}" for run in runs}, key=float)
    return " to ".join(taken[:1] + taken[1:][-1:])


def of_seeds(rates, n):
    low, high = wilson(min(rates) * n, n)
    return f"{', '.join(f'{rate:.2f}' for rate in rates)} [{low:.2f}, {high:.2f}]"


def written_into(page, blocks):
    """The page's text with every named block replaced. Raises ValueError for a block that is not
    there."""
    for name, text in blocks.items():
        pattern = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
        if not re.search(pattern, page, re.DOTALL):
            raise ValueError(f"there is no block called {name!r}.")
        page = re.sub(pattern, lambda m, text=text: m[1] + text + "\n" + m[2], page,
                      flags=re.DOTALL)
    return page


def with_episodes(page):
    """The page's text with every episode as its command prints it now."""
    return EPISODE.sub(lambda m: f"{m[1]}{cut(transcript(m[2], int(m[3])))}\n{m[4]}", page)


def cut(episode):
    """An episode in which of a shop's results the first two are told."""
    return re.sub(r"((?:^- .*\n){2})((?:^- .*\n)+)", lambda m: (
        f"{m[1]}[{m[2].count(chr(10))} more results]\n"), episode, flags=re.MULTILINE)


def log_lines():
    """The first and last console lines of the first GRPO run, printed again from its metrics by the
    function that printed them; `...` stands for the others."""
    config, metrics = archive.config(FIRST), archive.metrics(FIRST)
    first, rest = ([console_line(line, config) for line in part]
                   for part in (metrics[:2], metrics[config.steps:]))
    return "\n".join(["```text", *first, "...", *rest, "```"])


def environments_table():
    """One row for each environment, and one for the options of tiny's preset."""
    rows = json.loads(environments.STORED.read_text())
    assert all(row["players"]["solver"] == row["size"] for row in rows)
    return table(("environment, options", "random policy", "best shallow player"), [
        [", ".join([row["env"], *row["options"]]),
         *(f"{successes / row['size']:.2f}" for successes in (random, max(shallow)))]
        for row in rows for random, *shallow, _ in [row["players"].values()]])


def descriptions():
    """What each of the ten classes says of itself."""
    return "\n\n".join(described(make(env)) for env in REGISTRY)


FACTS = "Observation|Actions|Reward|Ends when|Solver|Splits|Options"
LEFT_OUT = ("Observation", "Actions", "Ends when", "Solver")


def described(env):
    """The docstring of an environment's class as a section of a page, with the budget, and the
    default of each option that is not off or empty."""
    name, budget = type(env).__name__, env.budget
    turns = "1 turn" if budget.max_turns == 1 else f"{budget.max_turns} turns"
    if budget.max_actions > budget.max_turns:
        turns += f", {budget.max_actions} actions"
    first, facts, *rest = inspect.getdoc(env).split("\n\n")
    told = re.sub(rf"\n\s*(?!(?:{FACTS}): )", " ", "\n".join([facts, *rest])).split("\n")
    text = "\n".join(f"- {fact}" for fact in told if not fact.startswith(LEFT_OUT))
    for option, value in env.defaults.items():
        if not re.search(rf"Options: .*`{option}`", text):
            raise ValueError(f"{name} does not describe its option {option}.")
        if value:
            text = re.sub(rf"(Options: .*?)`{option}`", rf"\1`{option}={value}`", text)
    text = re.sub(rf"^- ({FACTS}):", r"- **\1**:", text, flags=re.MULTILINE)
    return "\n".join([f"### {name}", "", f"{first} ({turns}; {env.bundled_data})", "", *(
        textwrap.fill(line, 120, break_long_words=False, break_on_hyphens=False,
                      subsequent_indent="  ") for line in text.split("\n"))])


def mutants_result():
    """What the stored run of tests/mutants.py found."""
    sample = json.loads((ROOT / "lab" / "results" / "mutants.json").read_text())["sample"]
    if sample is None:
        return "No run of it is stored yet."
    reasons = [*sample["survivors"].values()]
    missed = sum(not reason.startswith("equivalent") for reason in reasons)
    followed = sum(reason.startswith("test_") for reason in reasons)
    tried = sample["mutants"] - len(reasons) + missed
    trees = " and ".join(f"{tree[:12]} (`{name}/`)" for name, tree in sample["trees"].items())
    return (f"The stored run, `lab/results/mutants.json`, tested git trees {trees}.\n"
            f"In {sample['minutes']} minutes on two cores {tried - missed} of {tried} mutants that "
            f"change behaviour were killed ({100 - 100 * missed / tried:.0f} %).\n"
            f"Tests for {followed} of the other {missed} followed.")


# page -> {name of a block in it: function that makes its text}
PAGES = {"README.md": {"pretrained": pretrained_means},
         "docs/algorithms.md": {"tokens": tokens.figures},
         "docs/environments.md": {"environments": environments_table,
                                  "descriptions": descriptions},
         "docs/metrics.md": {"warnings": warnings_told},
         "docs/models.md": {"lora": lora_table, "vision": vision_table},
         "docs/performance.md": {"gpu": gpu.tables},
         "docs/running.md": {"log": log_lines},
         "docs/specification.md": {"mutants": mutants_result},
         "docs/pretrained.md": {
             "runs": pretrained_table, "control": control_line, "recipes": recipe_cards,
             "learnt": partial(learnt, "smollm2-frozenlake-s0"),
             "start": partial(start_line, "smollm2-lean-s0")},
         "docs/results.md": {"results": results_table,
                             "algorithms": leaderboard.algorithms_table,
                             "models": leaderboard.models_table}}


def rewritten(page):
    """The text of a page of `PAGES` as it should be."""
    blocks = {name: make() for name, make in PAGES[page].items()}
    return with_episodes(written_into((ROOT / page).read_text(), blocks))


def notebook(page):
    """The text of a chapter's notebook: INSTALL, then the page with its Python blocks as cells.

    What they print is left out, so that a reader can predict it; solutions stay folded in the text.
    Pictures are part of the text, because Colab shows no file beside a notebook."""
    import jupytext  # of the tests' extra, without which the leaderboard imports this file
    import nbformat

    def inlined(found):
        image = base64.b64encode((page.parent / found[2]).read_bytes()).decode()
        return f"![{found[1]}](data:image/png;base64,{image})"

    chapter, *exercises = re.split(r"^(?=## Exercises$)", page.read_text(), flags=re.MULTILINE)
    text = BLOCK.sub(r"```python\n\1```\n", chapter) + re.sub(
        r"^<details>.*?^</details>$", r"<!-- #region -->\n\g<0>\n<!-- #endregion -->",
        "".join(exercises), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\((\d-\w+)\.md\)", r"(\1.ipynb)", text)
    book = jupytext.reads(re.sub(r"^!\[(.*)\]\((.*)\)$", inlined, text, flags=re.MULTILINE), "md")
    book.cells.insert(0, nbformat.v4.new_code_cell(INSTALL))
    for number, cell in enumerate(book.cells):
        cell.id, cell.metadata = str(number), {}
    book.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"},
                     "language_info": {"name": "python"}}
    return nbformat.writes(book) + "\n"


if __name__ == "__main__":
    draw(ROOT / "docs" / "learning.png")
    draw_pretrained(ROOT / "docs" / "pretrained.png")
    draw_boards(ROOT / "docs" / "boards.png")
    algorithm.draw(ROOT / "docs", FIRST)
    pictures.draw(ROOT / "docs")
    for page in PAGES:
        (ROOT / page).write_text(rewritten(page))
    for page in COURSE:
        page.with_suffix(".ipynb").write_text(notebook(page))
    print(f"wrote the pictures of docs/, the notebooks of docs/course, and the "
          f"tables of {', '.join(PAGES)}")
