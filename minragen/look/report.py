"""One page about a run: what happened, curves, warnings, and what was said.

    python -m minragen report my-run            (or: make report RUN=my-run; training ends with it)
    python -m minragen report "a b c"           several runs in one page, runs/report.html

`runs/my-run/report.html` is one file that opens without a network. The page is data/report.html, a
Jinja template that escapes all it is given: what a model wrote is text there, never HTML. This
module computes what the page says and which numbers its curves have; a script in the template draws
them as SVG. Runs that differ in their seed alone become a mean with a band from the lowest to the
highest. The sentences about metrics are those of docs/metrics.md.

Reading order: `write`, `Run`, `story` and the other texts, `figures_of`, `conversations`.
"""

import dataclasses
import json
import os
import pkgutil
import re
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path

import jinja2
import numpy as np

from minragen.chat import reply_pattern
from minragen.config import BUDGETS, Config, changed_environment, env_names, summary
from minragen.environments.board import Board, read_tiles
from minragen.envs import REGISTRY, EnvGroups
from minragen.look.diagnostics import warnings_of
from minragen.look.faults import Parser, first_line
from minragen.look.intervals import difference, wilson
from minragen.more.vision import data_uri
from minragen.run import runs
from minragen.support.formats import FORMATS, forced_prefix
from minragen.support.options import parse_options, short

DATA = Path(__file__).parent.parent / "data"
EPISODES_SIZE = 2_000_000  # characters of conversations in a page; longer runs leave out steps
MOST_STEPS = 1000  # that are drawn, beside those with a validation
BUCKETS = *(f"bucket_{k}" for k in range(1, 7)), "all"  # of groups by reward std

# question -> (how to read its figures, title -> metrics). A page about several configurations shows
# the first metric of each title only.
CURVES = {
    "Did it learn?": (
        "Held-out instances are never trained on.",
        {"success": ("val/success", "success")}),
    "What does it learn from?": (
        "From groups whose members do not all have the same return. The return rises with success "
        "or before it.",
        {"return": ("episode_return", "val/episode_return"),
         "reward std": ("reward_std",),
         "gradient norm of groups by reward std": (
             *(f"gradient/{bucket}/task" for bucket in BUCKETS[:-1]),
             "gradient/all/entropy", "gradient/all/kl"),
         "groups": ("groups_kept", "groups_zero_std")}),
    "Does it still explore?": (
        "A policy that always says the same, or the same to every prompt, has nothing to select "
        "from.",
        {"entropy": ("entropy",),
         "mutual information": ("first_turn/mi", "trajectory/mi"),
         "retrieval": ("first_turn/retrieval", "first_turn/retrieval_chance"),
         "valid replies": ("valid", "valid_thinking", "distinct_3")}),
    "Does it stay close?": (
        "Small steps, not far from the model before RL, keep what it knew.",
        {"KL": ("kl_ref", "approx_kl", "kl_reward"),
         "clip fraction": ("clip_fraction",),
         "gradient norm": ("grad_norm", "critic_grad_norm")}),
    "Where does the time go?": (
        "A step samples episodes (the rollout), then learns from them. Long replies cost both.",
        {"seconds of a step": ("seconds", "rollout_seconds"),
         "tokens per second": ("tokens_per_second",),
         "share of the rollout that waits for environments": ("rollout_idle",),
         "seconds a reply waits for its environment": ("waited",),
         "reply tokens per episode": ("response_tokens",)})}
# What a line must have to be read.
NEEDED = {"metrics.jsonl": {"step"}, "trajectories.jsonl": {
    "step", "split", "env", "seed", "success", "stop", "error", "turn_rewards", "messages"}}
REASONS = {"terminated": "the environment ended the episode without success",
           "truncated": "turns or actions ran out", "context": "the context was full"}


def write(folders):
    """Write the page about these runs, and print what is left out. Returns its path. Raises
    ValueError if a folder is no run or has no metrics yet."""
    loaded = [Run(folder) for folder in folders]
    target = folders[0] if len(folders) == 1 else folders[0].parent
    kept = [conversations(run, EPISODES_SIZE // len(loaded)) for run in loaded]
    template = jinja2.Template((DATA / "report.html").read_text(encoding="utf-8"), autoescape=True,
                               undefined=jinja2.StrictUndefined)
    runs.write_whole(target / "report.html", template.render(
        runs=loaded, story=[*map(story, configurations(loaded).items())], title=title,
        facts=facts, problems=problems, rows=table(loaded), curves=CURVES,
        figures=figures_of(loaded), episodes=[e for episodes, _ in kept for e in episodes],
        every=" ".join(dict.fromkeys(said for _, said in kept if said)),
        tiles={name: [*map(data_uri, read_tiles(board.tiles, 8))] for run in loaded
               for name in run.envs if (board := board_of(name))}))
    for run in (run for run in loaded if run.left_out):
        print(f"left out  {run.name}: {'; '.join(run.left_out)}")
    return target / "report.html"


class Run:
    """The metrics of a run by step, its warnings and its episodes, as far as they can be read.
    `left_out`: clauses on what cannot, or is not drawn."""

    def __init__(self, folder):
        self.name, self.folder, self.config = folder.name, folder, runs.read_config(folder)
        self.left_out = []
        lines, self.episodes = map(self.read_lines, NEEDED)
        self.tested = {k: v for line in lines for k, v in line.items() if k.startswith("test/")}
        steps = {x["step"]: x for x in lines if not any(k.startswith("test/") for k in x)}
        if not steps:
            raise ValueError(f"{folder} has no metrics yet, or none that can be read.")
        every = 1 + len(steps) // MOST_STEPS
        self.history = [line for k, line in enumerate(reversed(steps.values()))
                        if k % every == 0 or line.get("val/success") is not None][::-1]
        if len(self.history) < len(steps):
            self.left_out.append(f"only {len(self.history)} of {len(steps)} steps are drawn")
        self.seconds, self.env_errors = (sum(line.get(name) or 0 for line in steps.values())
                                         for name in ("seconds", "env_errors"))
        self.seconds = lines[-1].get("elapsed") or self.seconds
        self.warnings = [(line["step"], sentence) for k, line in enumerate(self.history, 1)
                         for sentence in warnings_of(self.history[:k])]
        self.validated = [x for x in self.history if x.get("val/success") is not None]
        # Equal for runs that differ in their seed alone.
        self.settings = dataclasses.replace(self.config, run="", seed=0, device="")
        try:
            self.envs, self.summary = env_names(self.config), summary(self.config)
        except Exception as problem:  # a name that nothing has here
            self.envs, self.summary = [], f"unknown: {first_line(str(problem))}"

    def read_lines(self, name):
        """The JSON objects of a file that another process may be writing, without those that lack
        what is NEEDED."""
        path, lines, hurt = self.folder / name, [], []
        with open(path if path.is_file() else os.devnull, encoding="utf-8", errors="replace") as f:
            for number, text in enumerate(f, 1):
                try:
                    line = json.loads(text)
                except (ValueError, RecursionError):
                    line = None
                if isinstance(line, dict) and line.keys() >= NEEDED[name]:
                    lines.append(line)
                else:
                    hurt.append(number)
        if hurt:
            self.left_out.append(f"{len(hurt)} lines of {name} cannot be read; the first is line "
                                 f"{hurt[0]}")
        return lines

    def held_out(self, line, split):
        """The success of a split, its 95 % interval (low, high), and of how many episodes: those
        whose environment did not fail."""
        success = line[f"{split}/success"]
        n = max(self.config.val_size - (line.get(f"{split}/env_errors") or 0), 1)
        return success, *wilson(success * n, n), n

    def latest(self, split):
        """`held_out` of the test or of the last validation; None if there is none."""
        line = self.tested if split == "test" else (self.validated or [{}])[-1]
        return self.held_out(line, split) if line.get(f"{split}/success") is not None else None


# ---- Text ----------------------------------------------------------------------------------------
def story(labelled):
    """What happened to the held-out success of one configuration, in two sentences.

    A change counts if the 95 % interval of the difference leaves out 0. Of several seeds the mean
    is told, as sure as one of them: they play the same instances.

    labelled: (label, its runs), an item of `configurations`
    """
    label, members = labelled
    points = {}  # step -> (rate, low, high)
    for step in sorted(set.intersection(*({x["step"] for x in r.validated} for r in members))):
        rates = [r.held_out(x, "val") for r in members for x in r.validated if x["step"] == step]
        rate, n = np.mean([r[0] for r in rates]), min(r[3] for r in rates)
        points[step] = rate, *wilson(rate * n, n)
    who = f"{label}: h" if label else "H"
    who += f"eld-out success{f', mean of {len(members)} seeds,' if len(members) > 1 else ''}"
    if not points:
        return f"{who} has not been measured yet.", ""
    said = {step: "{:.2f} [{:.2f}, {:.2f}]".format(*point) for step, point in points.items()}
    first, last, best = min(points), max(points), max(points, key=points.get)
    if first == last:
        return f"{who} is {said[first]} at step {first}.", "There is no later validation yet."
    low, high = difference(points[first], points[last])
    start = (f"{who} {'rose' if low > 0 else 'fell'} from {said[first]} at step {first} to "
             f"{said[last]} at step {last}.")
    if low <= 0 <= high:
        start = (f"{who} did not move measurably: {said[first]} at step {first}, {said[last]} at "
                 f"step {last}.")
    changed = [step for step, point in points.items() if moved(point, points[last])]
    latest = {step: point[0] for step, point in points.items() if step > max(changed, default=-1)}
    if best != first and moved(points[best], points[last]):
        end = f"Its best was {said[best]} at step {best}; it has fallen since."
    elif not changed:
        end = f"A change below {(high - low) / 2:.2f} would not show."
    elif len(latest) == 1:
        end = "It still changed between the last two validations."
    else:
        end = (f"Since step {min(latest)} no change is measurable: all validations lie between "
               f"{min(latest.values()):.2f} and {max(latest.values()):.2f}.")
    return start, end


def moved(before, now):
    """Whether two rates, (rate, low, high), differ measurably."""
    low, high = difference(before, now)
    return not low <= 0 <= high


def title(run):
    """What a run is, in a few words."""
    config = run.config
    return f"{config.env} with {config.algo}, model {short(config.model)}, seed {config.seed}"


def facts(run):
    """[(name, text), ...]: what the run is, what it measured, and how to repeat it."""
    config, regimes = run.config, [line["regime"] for line in run.history if "regime" in line]
    rows = [("run", title(run)), ("settings", run.summary)]
    for line in run.validated[:1] + run.validated[1:][-1:]:
        rows.append((f"validation, step {line['step']}", rate(*run.held_out(line, "val"))))
    if len(run.validated) > 1:
        best = max(run.validated, key=lambda line: line["val/success"])
        rows.append(("best validation", f"{best['val/success']:.3f} at step {best['step']}"))
    if tested := run.latest("test"):
        rows.append(("test", rate(*tested)))
    if regimes:
        rows.append(("regime", regimes[-1]))
    rows.append(("time", f"{run.history[-1]['step']} of {config.steps} steps in "
                         f"{run.seconds / 60:.1f} minutes"))
    if commit := runs.commit_of(run.folder):
        rows.append(("commit", commit))
    return [*rows, ("to repeat it", f"make reproduce RUN={run.name}")]


def rate(success, low, high, n):
    """A measured success in words."""
    return f"success {success:.3f}, 95 % interval [{low:.3f}, {high:.3f}], {n} episodes"


def problems(run):
    """Sentences on what still goes wrong: failures, what the stored ones ended with, warnings."""
    said = []
    if run.validated:
        last, (success, *_, n) = run.validated[-1], run.latest("val")
        said.append(f"{n - round(success * n)} of {n} held-out episodes fail at step "
                    f"{last['step']}.")
        if (valid := last.get("val/valid")) is not None and valid < 0.995:
            said.append(f"{1 - valid:.0%} of the held-out turns are invalid: not in the response "
                        f"format, or without a valid action.")
    if run.env_errors:
        said.append(f"In {run.env_errors} training episodes the environment failed.")
    recent = [e for e in run.episodes if not (e["success"] or e["error"])
              and e["step"] > 0.75 * run.history[-1]["step"]]
    if reasons := "; ".join(f"{count} because {REASONS.get(reason, reason)}" for reason, count in
                            Counter(e["stop"] for e in recent).most_common()):
        said.append(f"How the {len(recent)} failed conversations that are stored from the last "
                    f"quarter of the steps ended: {reasons}.")
    return said + ([f"Warning at step {step}: {sentence}" for step, sentence in run.warnings]
                   or ["No warnings."])


def table(loaded):
    """Titles, and for each run: last validation, test, minutes, and how its test (else validation)
    differs from the first run's, with 95 % intervals."""
    split = "test" if all(run.tested for run in loaded) else "val"
    rows = [("run", "validation", "test", "minutes", f"{split}, minus the first run's")]
    for run in loaded:
        val, test = ("{:.3f} [{:.3f}, {:.3f}]".format(*found) if found else ""
                     for found in map(run.latest, ("val", "test")))
        first, now, change = loaded[0].latest(split), run.latest(split), ""
        if run is not loaded[0] and first and now:
            change = "{:+.3f} [{:+.3f}, {:+.3f}]".format(
                now[0] - first[0], *difference(first[:3], now[:3]))
        rows.append((run.name, val, test, f"{run.seconds / 60:.1f}", change))
    return rows


def configurations(loaded):
    """{label: its runs, which differ in their seed alone}, in the order of the runs. The label is
    what differs; "" for a single configuration."""
    groups = {}
    for run in loaded:
        groups.setdefault(run.settings, []).append(run)
    differ = [f.name for f in dataclasses.fields(Config)
              if len({getattr(settings, f.name) for settings in groups}) > 1]
    # In another environment or with another algorithm nearly everything differs.
    differ = [name for name in differ if name in ("env", "algo", "model")] or differ
    labels = {}
    for settings, found in groups.items():
        label = " ".join(f"{name}={short(getattr(settings, name))}" for name in differ)[:60]
        labels[label if label not in labels else f"{label[:50]} {found[0].name}"] = found
    return labels


@cache
def meanings():
    """{metric: [its definition, healthy values]}, from the tables of docs/metrics.md, to which the
    file in data/ is a link."""
    found = {}
    for line in (DATA / "metrics.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            for sampler, bucket in product(("first_turn", "trajectory"), BUCKETS):
                filled = line.replace("SAMPLER", sampler).replace("SPLIT", "val").replace(
                    "BUCKET", bucket)
                keys, *texts = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", filled).split("|")[1:4]
                found |= dict.fromkeys(re.findall("`(.*?)`", keys),
                                       [text.replace("`", "").strip() for text in texts])
    return found


# ---- Figures -------------------------------------------------------------------------------------
def figures_of(loaded):
    """{title: what the page's script draws}, without those whose metrics no run has."""
    figures = {}
    for question, (_, titles) in CURVES.items():
        for title, metrics in titles.items():
            meaning, healthy = meanings().get(metrics[0], ("", ""))
            figures[title] = {"question": question, "lines": curves(loaded, metrics),
                              "caption": f"Healthy: {healthy}." if healthy else
                              f"{' and '.join(metrics)}: {meaning}."}
    figures["success"] |= {
        "players": players(loaded), "limits": [0, 1], "caption":
        "Success at each step; higher is better. "
        f"A band is a 95 % interval{', or the range of several seeds' * (len(loaded) > 1)}. "
        "Dashed: players without a model. Move the pointer over a curve to read it, over a name to "
        "see what it means."}
    figures = {title: figure for title, figure in figures.items() if figure["lines"]}
    for figure in figures.values():
        figure.setdefault("limits", limits(figure["lines"]))
        figure["warnings"] = [warning for run in loaded for warning in run.warnings]
    return figures


def curves(loaded, metrics):
    """Lines over steps: of all metrics for one configuration, else of the first for each.

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
                "name": f"{label} ({len(members)})" if label else metric, "colour": colour,
                "help": "; healthy: ".join(filter(None, meanings().get(metric, ()))),
                "x": steps, "y": mean.tolist(),
                "low": low.tolist() if band else [], "high": high.tolist() if band else []})
    return lines


def limits(lines):
    """Where the vertical axis of these lines begins and ends: at 0 if nothing is below. Values far
    beyond nine tenths of the others are outliers, which the page marks at its edge."""
    values = np.concatenate([line["y"] for line in lines])
    low, usual_low, usual_high, high = np.quantile(values, (0, 0.05, 0.95, 1))
    reach = 1.5 * max(usual_high - min(0, usual_low), 1e-9)
    return [min(0, max(low, usual_low - reach)), max(1.05 * min(high, usual_high + reach), 1e-9)]


def players(loaded):
    """[(name, success), ...] of the scripted players, if they were measured with the environment
    options of the runs."""
    rows = json.loads((DATA / "players.json").read_text("utf-8"))
    same = {(run.config.env, *changed_environment(run.config)) for run in loaded}
    for row in rows:
        if same == {(row["env"], *row["options"])}:
            random, *shallow, _ = (count / row["size"] for count in row["players"].values())
            return [("best shallow player", max(shallow)), ("random policy", random)]
    return []


# ---- Conversations -------------------------------------------------------------------------------
def conversations(run, size):
    """The stored episodes of so many steps as make about `size` characters, evenly and the last one
    of each split, and a sentence about those left out."""
    every, chosen, boards = -(-len(json.dumps(run.episodes)) // size), set(), boards_of(run)
    for split in {e["split"] for e in run.episodes}:
        steps = sorted({e["step"] for e in run.episodes if e["split"] == split})
        chosen |= {(split, step) for step in (*steps[::every], steps[-1])}
    return ([e | {"run": run.name, "boards": boards(e)} for e in run.episodes
             if (e["split"], e["step"]) in chosen],
            f"Only one in {every} stored steps fits into this page." if every > 1 else "")


def board_of(name):
    """The class of an environment that has a board, else None."""
    found = pkgutil.resolve_name(REGISTRY[name]) if name in REGISTRY else None
    return found if isinstance(found, type) and issubclass(found, Board) else None


def boards_of(run):
    """A function from an episode to its boards before each reply and after the last: rows of the
    indices of tiles. It plays the episode again; [] if the environment has no board, or does not
    show what the model was shown, or showed images, which are stored."""
    config, names = run.config, run.envs
    budgets = {name: getattr(config, name) for name in BUDGETS if getattr(config, name)}

    @cache
    def groups(split):
        return EnvGroups(",".join(names), len(names), 1, split, parse_options(config.env_arg),
                         budgets, layers=config.layer)

    def played(episode):
        pattern = reply_pattern(FORMATS[config.response_format])
        env = groups(episode["split"]).envs[names.index(episode["env"])]
        observation, _ = env.reset(seed=episode["seed"],
                                   options={"member": episode.get("member", 0)})
        grids = [env.cells()]
        for told, reply in zip(episode["messages"][1::2], episode["messages"][2::2]):
            if told["content"] != observation:
                return []
            found = pattern.match(forced_prefix(config.response_format) + reply["content"])
            observation, *_ = env.step(found["answer"].strip() if found else "")
            grids.append(env.cells())
        return grids

    def boards(episode):
        try:
            return played(episode) if all(map(board_of, names)) and "images" not in episode else []
        except Exception:  # options that are no more, an episode that has been changed
            return []

    return boards


# ---- The command ---------------------------------------------------------------------------------
def main(argv):
    """The command: write a page."""
    parser = Parser(prog="minragen report", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="+", help="folders under runs/")
    names = " ".join(parser.parse_args(argv).runs).split()
    for name in names or [""]:
        runs.load_config(name)
    print(write([runs.RUNS / name for name in names]))
