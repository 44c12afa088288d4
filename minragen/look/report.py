"""One page about a run: what happened, curves, warnings, and what was said.

    python -m minragen report my-run            (or: make report RUN=my-run; training ends with it)
    python -m minragen report "a b c"           several runs in one page, runs/report.html

`runs/my-run/report.html` is one file that opens without a network. The page is data/report.html, a
Jinja template that escapes all it is given: what a model wrote is text there, never HTML. This
module computes what the page says and which numbers its curves have; a script in the template draws
them as SVG.

Reading order: `write`, `Run`, `story` and the other texts, `figures_of`.
"""

import dataclasses
import json
import re
from functools import cache
from pathlib import Path

import jinja2
import numpy as np

from minragen.config import summary
from minragen.look.diagnostics import warnings_of
from minragen.look.evaluate import changed_environment
from minragen.look.faults import Parser, first_line
from minragen.look.intervals import difference, wilson
from minragen.run import runs
from minragen.support.options import short

DATA = Path(__file__).parent.parent / "data"
EPISODES_SIZE = 2_000_000  # characters of conversations in a page; longer runs leave out steps
MOST_STEPS = 1000  # that are drawn, beside those with a validation

# question -> (how to read its figures, title -> metrics). A page about several configurations shows
# the first metric of each title only.
CURVES = {
    "Did it learn?": (
        "Held-out instances are never trained on. A band is a 95 % interval, or the range of "
        "several seeds. Dashed: players without a model. Point at a curve or a name to read it.",
        {"success": ("val/success", "success")}),
    "What does it learn from?": (
        "From groups whose members do not all have the same return. The return rises with success "
        "or before it.",
        {"return": ("episode_return", "val/episode_return"),
         "reward std": ("reward_std",),
         "gradient norm of groups by reward std": (
             *(f"gradient/bucket_{k}/task" for k in range(1, 7)),
             "gradient/all/entropy", "gradient/all/kl"),
         "groups": ("groups_kept", "groups_zero_std")}),
    "Does it still explore?": (
        "A policy that never varies its reply to a prompt, or replies to all prompts alike, has "
        "nothing to select from.",
        {"entropy": ("entropy",),
         "mutual information": ("first_turn/mi", "trajectory/mi"),
         "retrieval": ("first_turn/retrieval", "first_turn/retrieval_chance"),
         "valid replies": ("valid", "valid_thinking", "distinct_3"),
         "reply tokens per episode": ("response_tokens",)}),
    "Does it stay close?": (
        "Small steps, not far from the model before RL, keep what it knew.",
        {"KL": ("kl_ref", "approx_kl", "kl_reward"),
         "clip fraction": ("clip_fraction",),
         "gradient norm": ("grad_norm", "critic_grad_norm")})}
# What a line must have to be read, beside its step.
NEEDED = {"metrics.jsonl": (), "trajectories.jsonl": (
    "split", "env", "seed", "success", "stop", "error", "turn_rewards", "messages")}


def write(folders):
    """Write the page about these runs. Returns its path. Raises ValueError if a folder is no run or
    has no metrics yet."""
    loaded = [Run(folder) for folder in folders]
    target = folders[0] if len(folders) == 1 else folders[0].parent
    template = jinja2.Template((DATA / "report.html").read_text(encoding="utf-8"), autoescape=True,
                               undefined=jinja2.StrictUndefined)
    runs.write_whole(target / "report.html", template.render(
        runs=loaded, story=[story(*of_one) for of_one in configurations(loaded).items()],
        facts=[*map(facts, loaded)], problems=problems, curves=CURVES, figures=figures_of(loaded),
        episodes=[e for run in loaded for e in run.conversations(EPISODES_SIZE // len(loaded))]))
    return target / "report.html"


class Run:
    """The metrics of a run by step, its warnings and its episodes, as far as they can be read.
    `left_out`: what cannot, or is not drawn, in words."""

    def __init__(self, folder):
        self.name, self.folder, self.config = folder.name, folder, runs.read_config(folder)
        found = {name: runs.read_lines(folder / name, needed) for name, needed in NEEDED.items()}
        lines, self.episodes = (read for read, _ in found.values())
        self.left_out = [f"{hurt} lines of {name}, which cannot be read"
                         for name, (_, hurt) in found.items() if hurt]
        self.tested = {k: v for line in lines for k, v in line.items() if k.startswith("test/")}
        steps = {x["step"]: x for x in lines if not any(k.startswith("test/") for k in x)}
        if not steps:
            raise ValueError(f"{folder} has no metrics yet, or none that can be read.")
        every = 1 + len(steps) // MOST_STEPS
        self.history = [line for k, line in enumerate(reversed(steps.values()))
                        if k % every == 0 or line.get("val/success") is not None][::-1]
        if len(self.history) < len(steps):
            self.left_out.append(f"{len(steps) - len(self.history)} of {len(steps)} steps")
        self.seconds, self.env_errors = (sum(line.get(name) or 0 for line in steps.values())
                                         for name in ("seconds", "env_errors"))
        self.seconds = lines[-1].get("elapsed") or self.seconds
        self.warnings = [(line["step"], sentence) for k, line in enumerate(self.history, 1)
                         for sentence in warnings_of(self.history[:k])]
        self.validated = [x for x in self.history if x.get("val/success") is not None]
        # Equal for runs that differ in their seed alone.
        self.settings = dataclasses.replace(self.config, run="", seed=0, device="")

    def held_out(self, line, split):
        """The success of a split, its 95 % interval (low, high), and of how many episodes: those
        whose environment did not fail. None if the line has none."""
        if (success := line.get(f"{split}/success")) is None:
            return None
        n = max(self.config.val_size - (line.get(f"{split}/env_errors") or 0), 1)
        return success, *wilson(success * n, n), n

    def conversations(self, size):
        """Stored episodes of about `size` characters: of evenly spaced steps, and of the first and
        the last step of each split."""
        every = -(-len(json.dumps(self.episodes)) // size)
        if every > 1:
            self.left_out.append(f"the conversations of all but one in {every} steps")
        stored = sorted({(e["split"], e["step"]) for e in self.episodes})
        chosen = {*stored[::every], *dict(stored[::-1]).items(), *dict(stored).items()}
        return [e | {"run": self.name} for e in self.episodes if (e["split"], e["step"]) in chosen]


# ---- Text ----------------------------------------------------------------------------------------
def story(label, members):
    """What happened to the held-out success of one configuration.

    A change counts if the 95 % interval of the difference leaves out 0. Several seeds give their
    mean, with the interval of one of them: they play the same instances.
    """
    points = {}  # step -> (rate, low, high)
    for step in sorted(set.intersection(*({x["step"] for x in r.validated} for r in members))):
        rates = [r.held_out(x, "val") for r in members for x in r.validated if x["step"] == step]
        rate, n = np.mean([r[0] for r in rates]), min(r[3] for r in rates)
        points[step] = rate, *wilson(rate * n, n)
    who = f"{label}: h" if label else "H"
    who += f"eld-out success{f', mean of {len(members)} seeds,' if len(members) > 1 else ''}"
    if not points:
        return f"{who} has not been measured yet."
    said = {step: "{:.2f} [{:.2f}, {:.2f}] at step {}".format(*point, step)
            for step, point in points.items()}
    first, last, best = min(points), max(points), max(points, key=points.get)
    if first == last:
        return f"{who} is {said[first]}."
    low, high = difference(points[first], points[last])
    if low <= 0 <= high:
        told = f"{who} did not move measurably: {said[first]}, {said[last]}."
    else:
        told = f"{who} {'rose' if low > 0 else 'fell'} from {said[first]} to {said[last]}."
    if best != first and difference(points[best], points[last])[1] < 0:
        told += f" Its best was {said[best]}; it has fallen since."
    return told


def facts(run):
    """{name: text}: what a run is, what it measured, and how to repeat it; "" for what is unknown.
    The names are the same for all runs, which stand side by side."""
    try:
        settings = summary(run.config)
    except Exception as problem:  # e.g. an environment that is not here
        settings = f"unknown: {first_line(str(problem))}"
    measured = {"validation": run.held_out((run.validated or [{}])[-1], "val"),
                "test": run.held_out(run.tested, "test")}
    regimes = [line["regime"] for line in run.history if "regime" in line]
    said = {name: "success {:.3f}, 95 % interval [{:.3f}, {:.3f}], {} episodes".format(*found)
            if found else "" for name, found in measured.items()}
    config = run.config
    return {"run": f"{run.name}: {config.env} with {config.algo}, model {short(config.model)}, "
                   f"seed {config.seed}", "settings": settings, **said,
            "regime": regimes[-1] if regimes else "",
            "time": f"{run.history[-1]['step']} of {config.steps} steps in "
                    f"{run.seconds / 60:.1f} minutes",
            "commit": runs.commit_of(run.folder), "to repeat it": f"make reproduce RUN={run.name}"}


def problems(run):
    """Sentences on what still goes wrong: failures and warnings."""
    said = []
    if run.validated:
        last = run.validated[-1]
        success, *_, n = run.held_out(last, "val")
        said.append(f"{n - round(success * n)} of {n} held-out episodes fail at step "
                    f"{last['step']}.")
        if (valid := last.get("val/valid")) is not None and valid < 0.995:
            said.append(f"{1 - valid:.0%} of the held-out turns are invalid: not in the response "
                        f"format, or without a valid action.")
    if run.env_errors:
        said.append(f"In {run.env_errors} training episodes the environment failed.")
    return said + ([f"Warning at step {step}: {sentence}" for step, sentence in run.warnings]
                   or ["No warnings."])


def configurations(loaded):
    """{label: its runs, which differ in their seed alone}, in the order of the runs. The label is
    their names; "" for a single configuration."""
    groups = {}
    for run in loaded:
        groups.setdefault(run.settings, []).append(run)
    if len(groups) == 1:
        return {"": loaded}
    return {" ".join(run.name for run in members): members for members in groups.values()}


@cache
def meanings():
    """{metric: [its definition, healthy values]}, from the tables of docs/metrics.md, to which the
    file in data/ is a link."""
    text, found = (DATA / "metrics.md").read_text(encoding="utf-8"), {}
    for general, one in (("SPLIT", "val"), ("SAMPLER", "first_turn"), ("BUCKET", "bucket_1")):
        text = text.replace(general, one)
    for line in re.sub(r"\[(.*?)\]\(.*?\)", r"\1", text).splitlines():
        if line.startswith("| `"):
            keys, *texts = line.split("|")[1:4]
            found |= dict.fromkeys(re.findall("`(.*?)`", keys),
                                   [text.replace("`", "").strip() for text in texts])
    return found


# ---- Figures -------------------------------------------------------------------------------------
def figures_of(loaded):
    """{title: what the page's script draws}, without those whose metrics no run has."""
    figures = {}
    for question, (_, titles) in CURVES.items():
        for title, metrics in titles.items():
            if lines := curves(loaded, metrics):
                meaning, healthy = meanings()[metrics[0]]
                held_out = title == "success"
                figures[title] = {
                    "question": question, "lines": lines, "caption": f"Healthy: {healthy}."
                    if healthy else f"{' and '.join(metrics)}: {meaning}.",
                    "limits": [0, 1] if held_out else limits(lines),
                    "players": players(loaded) if held_out else [],
                    "warnings": [warning for run in loaded for warning in run.warnings]}
    return figures


def curves(loaded, metrics):
    """Lines over steps: all metrics of a single configuration, or the first metric of each one.

    A validation success has its 95 % band; several seeds have one from lowest to highest, over the
    steps that all of them have.
    """
    groups, lines = configurations(loaded), []
    for number, (label, members) in enumerate(groups.items()):
        for colour, metric in enumerate(metrics if len(groups) == 1 else metrics[:1], number):
            series = [{line["step"]: line[metric] for line in run.history
                       if line.get(metric) is not None} for run in members]
            steps = sorted(set.intersection(*map(set, series)))
            if not steps:
                continue
            values = np.array([[one[step] for step in steps] for one in series], float)
            low, high, mean = values.min(axis=0), values.max(axis=0), values.mean(axis=0)
            if metric == "val/success" and len(members) == 1:
                low, high = np.array([members[0].held_out(line, "val")[1:3]
                                      for line in members[0].validated]).T
            band = (low < high).any()
            lines.append({
                "name": label or metric, "colour": colour,
                "help": "; healthy: ".join(filter(None, meanings().get(metric, ()))),
                "x": steps, "y": mean.tolist(),
                "low": low.tolist() if band else [], "high": high.tolist() if band else []})
    return lines


def limits(lines):
    """The limits of the vertical axis; the lower one is 0 if no value is below. Values far
    beyond nine tenths of the others are outliers, which the page marks at its edge."""
    values = np.concatenate([line["y"] for line in lines])
    low, usual_low, usual_high, high = np.quantile(values, (0, 0.05, 0.95, 1))
    reach = 1.5 * max(usual_high - min(0, usual_low), 1e-9)
    return [min(0, max(low, usual_low - reach)), max(1.05 * min(high, usual_high + reach), 1e-9)]


def players(loaded):
    """[(name, success), ...] of the scripted players, if they were measured with the environment
    options of the runs."""
    same = {(run.config.env, *changed_environment(run.config)) for run in loaded}
    for row in json.loads((DATA / "players.json").read_text("utf-8")):
        if same == {(row["env"], *row["options"])}:
            random, *shallow, _ = (count / row["size"] for count in row["players"].values())
            return [("best shallow player", max(shallow)), ("random policy", random)]
    return []


# ---- The command ---------------------------------------------------------------------------------
def main(argv):
    """The command: write a page."""
    parser = Parser(prog="minragen report", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="+", help="folders under runs/")
    names = " ".join(parser.parse_args(argv).runs).split()
    for name in names or [""]:
        runs.load_config(name)
    print(write([runs.RUNS / name for name in names]))
