"""One page about a run: curves, warnings, the map of regimes, and what was said.

    python -m minragen report my-run            (or: make report RUN=my-run; training ends with it)
    python -m minragen report "a b c"           several runs in one page, runs/report.html
    python -m minragen watch my-run             (or: make watch RUN=my-run) again after every step

`runs/my-run/report.html` opens without a network. Its figures stand beside it as PNG, in
`figures/`. Runs that differ in their seed alone become a mean with a band from the lowest to the
highest. The page is data/report.html, a Jinja template that escapes all it is given: what a model
wrote is text there, never HTML.

Reading order: `write`, `Run`, `figures_of`, `curves`, `conversations`.
"""

import dataclasses
import io
import json
import re
import time
from functools import partial
from pathlib import Path

import jinja2
import numpy as np

from minragen.config import Config, summary
from minragen.look.diagnostics import LOW_ENTROPY, LOW_MI, NO_ENTROPY, warnings_of
from minragen.look.faults import Parser
from minragen.look.intervals import wilson
from minragen.run import runs

TEMPLATE = Path(__file__).parent.parent / "data" / "report.html"
EPISODES_SIZE = 2_000_000  # characters of conversations in a page; longer runs leave out steps
RELOAD = 5  # seconds between two looks at a page that is watched

# title -> metrics. A page about several configurations shows the first one only.
CURVES = {
    "success": ("val/success", "val/success_greedy", "success"),
    "return": ("episode_return", "val/episode_return"),
    "entropy": ("entropy",),
    "mutual information": ("first_turn/mi", "trajectory/mi"),
    "retrieval": ("first_turn/retrieval", "first_turn/retrieval_chance"),
    "gradient norm": ("grad_norm", "critic_grad_norm"),
    "reward std": ("reward_std",),
    "groups": ("groups_kept", "groups_zero_std"),
    "reply tokens per episode": ("response_tokens",),
    "valid replies": ("valid", "valid_thinking", "distinct_3"),
    "clip fraction": ("clip_fraction",),
    "KL": ("kl_ref", "approx_kl", "kl_reward"),
    "seconds of a step": ("seconds", "rollout_seconds")}


def write(folders, png=True, reload=0):
    """Write the page about these runs, and its figures. Returns its path.

    png: also every figure as PNG, in `figures/`      reload: seconds after which a browser reads
        the page again; 0: never
    raises: ValueError if a folder is no run or has no metrics yet
    """
    loaded = [Run(folder) for folder in folders]
    target = folders[0] if len(folders) == 1 else folders[0].parent
    figures = figures_of(loaded)
    if png:
        (target / "figures").mkdir(exist_ok=True)
        for title, figure in figures.items():
            figure.savefig(target / "figures" / f"{title.replace(' ', '-')}.png", dpi=150)
    episodes, left_out = conversations(loaded[0]) if len(loaded) == 1 else ([], "")
    template = jinja2.Template(TEMPLATE.read_text(encoding="utf-8"), autoescape=True,
                               undefined=jinja2.StrictUndefined)
    runs.write_whole(target / "report.html", template.render(
        runs=loaded, facts=facts, figures=map(svg, figures.values()), episodes=episodes,
        left_out=left_out, reload=reload))
    return target / "report.html"


class Run:
    """The metrics of a run by step, and its warnings."""

    def __init__(self, folder):
        self.name, self.folder, self.config = folder.name, folder, runs.read_config(folder)
        lines = read_lines(folder / "metrics.jsonl")
        if not lines:
            raise ValueError(f"{folder} has no metrics yet.")
        self.tested = {k: v for line in lines for k, v in line.items() if k.startswith("test/")}
        self.history = [line for line in lines if "test/success" not in line]
        self.warnings = [(line["step"], sentence) for k, line in enumerate(self.history, 1)
                         for sentence in warnings_of(self.history[:k])]
        # Equal for runs that differ in their seed alone.
        self.settings = dataclasses.replace(self.config, run="", seed=0, device="", threads=0)

    def series(self, *metrics):
        """The steps that have all these metrics, and their values: arrays of equal length."""
        found = [(line["step"], *(line[m] for m in metrics)) for line in self.history
                 if all(line.get(m) is not None for m in metrics)]
        return np.array(found, float).reshape(-1, 1 + len(metrics)).T

    def held_out(self, line, split, suffix=""):
        """The success of a split, its 95 % interval (low, high), and of how many episodes: those
        whose environment did not fail."""
        success = line[f"{split}/success{suffix}"]
        n = self.config.val_size - (line.get(f"{split}/env_errors{suffix}") or 0)
        return success, *wilson(success * n, n), n


def read_lines(path):
    """The JSON objects of a file that another process may be writing."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break  # the last line is not whole yet
    return lines


# ---- Text ----------------------------------------------------------------------------------------
def facts(run):
    """[(name, text), ...]: what the run is, whether it learned, and its warnings."""
    config, regimes = run.config, [line["regime"] for line in run.history if "regime" in line]
    rows = [("run", f"{config.env} with {config.algo}, model {config.model}, seed {config.seed}"),
            ("settings", summary(config))]
    rate = "success {:.3f}, 95 % interval [{:.3f}, {:.3f}], {} episodes".format
    validated = [line for line in run.history if line.get("val/success") is not None]
    for line in validated[:1] + validated[1:][-1:]:
        rows.append((f"validation, step {line['step']}", rate(*run.held_out(line, "val"))))
    if len(validated) > 1:
        best = max(validated, key=lambda line: line["val/success"])
        rows.append(("best validation", f"{best['val/success']:.3f} at step {best['step']}"))
    if "test/success" in run.tested:
        rows.append(("test", rate(*run.held_out(run.tested, "test"))))
    if regimes:
        rows.append(("regime", regimes[-1]))
    return rows + ([(f"warning, step {step}", sentence) for step, sentence in run.warnings]
                   or [("warnings", "none")])


def configurations(loaded):
    """{label: its runs, which differ in their seed alone}, in the order of the runs."""
    groups = {}
    for run in loaded:
        groups.setdefault(run.settings, []).append(run)
    differ = [f.name for f in dataclasses.fields(Config)
              if len({getattr(settings, f.name) for settings in groups}) > 1]
    # In another environment or with another algorithm nearly everything differs.
    differ = [name for name in differ if name in ("env", "algo", "model")] or differ
    labels = {}
    for settings, found in groups.items():
        label = plain(" ".join(f"{name}={getattr(settings, name)}" for name in differ))
        label = label[:60] or settings.env
        labels[label if label not in labels else f"{label[:50]} {found[0].name}"] = found
    return labels


def plain(label):
    """A label that matplotlib shows as it is: `$` begins a formula, `_` at the start hides it."""
    return label.lstrip("_").replace("$", r"\$")


# ---- Figures -------------------------------------------------------------------------------------
def figures_of(loaded):
    """{title: matplotlib Figure}, without those whose metrics no run has."""
    from matplotlib.figure import Figure  # not pyplot: no window, no global state

    drawings = {title: partial(curves, title=title) for title in CURVES}
    drawings |= {"regimes": regime_map, "gradients by reward std": gradients}
    figures = {}
    for title, draw in drawings.items():
        figure = Figure(figsize=(5, 3), layout="constrained")
        axes = figure.subplots()
        axes.set_title(title, fontsize="medium")
        axes.grid(alpha=0.2)
        draw(axes, loaded)
        if axes.lines:
            axes.legend(fontsize="small", loc="center right" if draw is regime_map else "best")
            figures[title] = figure
    return figures


def curves(axes, loaded, title):
    """Metrics over steps: all of a title's for one configuration, else the first of each.

    A validation success has its 95 % band; several seeds have one from lowest to highest, over the
    steps that all of them have. A dotted line marks each warning.
    """
    groups = configurations(loaded)
    metrics = CURVES[title] if len(groups) == 1 else CURVES[title][:1]
    for label, members in groups.items():
        for metric in metrics:
            series = [dict(zip(*run.series(metric))) for run in members]  # step -> value
            steps = sorted(set.intersection(*map(set, series)))
            if not steps:
                continue
            values = np.array([[one[step] for step in steps] for one in series])
            name = metric if len(groups) == 1 else f"{label} ({len(members)})"
            line, = axes.plot(steps, values.mean(axis=0), label=name,
                              marker="o" if len(steps) < 30 else "", markersize=3)
            low, high = values.min(axis=0), values.max(axis=0)
            if metric.startswith("val/success") and len(members) == 1:
                low, high = np.array([
                    members[0].held_out(line, "val", metric.removeprefix("val/success"))[1:3]
                    for line in members[0].history if line.get(metric) is not None]).T
            axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    if not axes.lines:
        return
    for step in sorted({step for run in loaded for step, _ in run.warnings}):
        axes.axvline(step, color="tab:red", linestyle=":", linewidth=1)
    if title == "gradient norm" and any((line.get_ydata() > 0).any() for line in axes.lines):
        axes.set_yscale("log")
    axes.set_xlabel("step")


def regime_map(axes, loaded):
    """Conditional entropy against mutual information of first turns: each run is a path through
    four regimes, from a circle to a square. The limits are those of `diagnostics.regime`."""
    for run in loaded:
        steps, entropy, mi = run.series("first_turn/conditional_entropy_per_token", "first_turn/mi")
        if len(steps) < 2:
            continue
        line, = axes.plot(entropy, mi, label=plain(run.name), linewidth=1)
        axes.scatter(entropy[0], mi[0], marker="o", color=line.get_color())
        axes.scatter(entropy[-1], mi[-1], marker="s", color=line.get_color())
        for k in {0, len(steps) // 2, len(steps) - 1}:
            axes.annotate(f"{steps[k]:.0f}", (entropy[k], mi[k]), fontsize="small")
        axes.axvline(max(LOW_ENTROPY * entropy[0], NO_ENTROPY), color=line.get_color(),
                     linestyle=":", linewidth=1)
        axes.axhline(LOW_MI * mi[0], color=line.get_color(), linestyle=":", linewidth=1)
    for x, y, text in ((0.01, 0.98, "compressed"), (0.99, 0.98, "diverse"),
                       (0.01, 0.02, "low-entropy collapse"), (0.99, 0.02, "template collapse")):
        axes.text(x, y, text, transform=axes.transAxes, alpha=0.5, fontsize="small",
                  ha="left" if x < 0.5 else "right", va="top" if y > 0.5 else "bottom")
    axes.set(xlabel="H(Z|X), nats per token", ylabel="I(X;Z), nats")


def gradients(axes, loaded):
    """Gradient norm per token by bucket of reward std, of the last measurement of the first run.
    Logarithmic, since a KL is often tiny."""
    measured = [line for line in loaded[0].history if "gradient/all/groups" in line]
    if not measured:
        return
    now = measured[-1]
    buckets = [name.removesuffix("/groups") for name in now
               if re.fullmatch(r"gradient/bucket_\d+/groups", name)]
    for term in ("task", "entropy", "kl"):
        points = [(now[f"{bucket}/reward_std"], now[f"{bucket}/{term}"]) for bucket in buckets
                  if f"{bucket}/{term}" in now]
        if points:
            axes.plot(*zip(*points), "o-", label=term)
    axes.set_title(f"gradients by reward std, step {now['step']}", fontsize="medium")
    axes.set(xlabel="mean reward std of the bucket", ylabel="gradient norm per token",
             yscale="log")


def svg(figure):
    """The figure as an <svg> element. Its texts stay texts, which keeps it small."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "minragen"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg"):]


# ---- Conversations -------------------------------------------------------------------------------
def conversations(run):
    """The stored episodes that fit into a page, and a sentence about those left out.

    Of a long run every second step of each split is kept, or every fourth, ...; and the last one.
    """
    episodes = read_lines(run.folder / "trajectories.jsonl")
    steps = {split: sorted({e["step"] for e in episodes if e["split"] == split})
             for split in {e["split"] for e in episodes}}
    kept, every, longest = episodes, 1, max(map(len, steps.values()), default=0)
    while len(json.dumps(kept)) > EPISODES_SIZE and every < longest:
        every *= 2
        chosen = {(split, step) for split, all_of in steps.items()
                  for step in (*all_of[::every], all_of[-1])}
        kept = [e for e in episodes if (e["split"], e["step"]) in chosen]
    return kept, f"Only every {every}th stored step fits into this page." if every > 1 else ""


def main(argv):
    """The command: write a page, or write it again while the run goes on."""
    parser = Parser(prog="minragen report", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", help="folders under runs/")
    parser.add_argument("--watch", action="store_true",
                        help="write the page again after every step; it reloads itself")
    args = parser.parse_args(argv)
    names = " ".join(args.runs).split()
    folders = [runs.RUNS / name for name in names]
    for name in names or [""]:
        runs.load_config(name)
    if args.watch:
        watch(folders)
    print(write(folders))


def watch(folders):
    """Write the page whenever metrics have been added, until Ctrl-C."""
    seen = None
    try:
        while True:
            now = [path.stat().st_size if path.exists() else 0
                   for path in (folder / "metrics.jsonl" for folder in folders)]
            if now != seen and all(now):
                seen = now
                print(write(folders, png=False, reload=RELOAD), flush=True)
            time.sleep(1)
    except KeyboardInterrupt:
        print()
