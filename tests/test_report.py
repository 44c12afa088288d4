"""The page about a run: true curves, in a real browser, and nothing of a model's text is run."""

import dataclasses
import html
import json
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser
from urllib.parse import unquote

import numpy as np
import pytest

from minragen.__main__ import main
from minragen.config import from_options
from minragen.look import report
from minragen.look.intervals import wilson
from minragen.look.report import Run, conversations, figures_of

HOSTILE = ("</script><script>document.title = 1</script><img src=x onerror=alert(1)>"
           "{{ 7 * 7 }}{% set x %}")
INTERVAL = "95 % interval [{:.3f}, {:.3f}]"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def store(folder, steps=8, hostile="", size=1, **options):
    """The files of a run that never was, in folder."""
    folder.mkdir(parents=True)
    config = from_options(dict(env="frozenlake", model="tiny", val_size=64, **options))
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    lines, episodes = [], []
    for step in range(steps + 1):
        line = {"step": step}
        if step % 4 == 0:
            line |= {"val/success": 0.5 + step % 7 / 64, "val/success_greedy": 0.25}
        if step:
            line |= {"success": 0.1 * config.seed + step / 100, "entropy": 1 / step,
                     "grad_norm": step, "reward_std": 0.3, "groups_kept": 7, "seconds": 2.0}
        if step in (1, steps):
            line |= {"first_turn/conditional_entropy_per_token": 1 / step,
                     "first_turn/mi": 2 - step / 8, "gradient/all/groups": 2,
                     "regime": "diverse" if step == 1 else "compressed",
                     "gradient/bucket_1/groups": 1, "gradient/bucket_1/reward_std": 0.1,
                     "gradient/bucket_1/task": step, "gradient/bucket_2/groups": 1}
        lines.append(line)
        for member in range(2):
            for split in ("val", "train") if step % 4 == 0 else ("train",):
                episodes.append({
                    "step": step, "split": split, "env": "frozenlake", "seed": 3 + step * (
                        split == "train") + member * (split == "val"), "group": 0,
                    "member": member, "success": member == 0, "stop": "terminated", "error": "",
                    "turn_rewards": [0.0, float(member == 0)],
                    "messages": [{"role": "system", "content": "rules"},
                                 {"role": "user", "content": f"step {step}{hostile}"},
                                 {"role": "assistant", "content": f"up{hostile}" * size},
                                 {"role": "user", "content": "on"},
                                 {"role": "assistant", "content": "down"}],
                    "replies": [{"tokens": [f"up{hostile}"] * size, "logprobs": [-0.5] * size,
                                 "advantages": [1 - 2.0 * member] * size * (split == "train")},
                                {"tokens": ["do", "wn"], "logprobs": [-1.0, 0.0],
                                 "advantages": [0.5, -0.5] * (split == "train")}]})
    lines.append({"step": steps, "test/success": 0.75})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "trajectories.jsonl").write_text("".join(json.dumps(e) + "\n" for e in episodes))
    return folder


def rewritten(path, change):
    path.write_text(change(path.read_text()))


@pytest.fixture
def plain(monkeypatch):
    """Pages without figures, which take longer than all else."""
    monkeypatch.setattr(report, "figures_of", lambda loaded: {})


def drawn(figure):
    """{label: (steps, values)} of a figure's lines, without those of warnings and limits."""
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
            for line in figure.axes[0].lines if not line.get_label().startswith("_")}


def band(figure, number=0):
    """{(step, value), ...}: the corners of the shaded area of the figure's line `number`."""
    corners = figure.axes[0].collections[number].get_paths()[0].vertices
    return {(round(x, 6), round(y, 6)) for x, y in corners}


class TestCurves:
    def test_they_are_the_metrics_and_validation_has_its_interval(self, tmp_path):
        figures = figures_of([Run(store(tmp_path / "a"))])
        lines, rates = drawn(figures["success"]), {0: 32 / 64, 4: 36 / 64, 8: 33 / 64}
        assert lines["val/success"] == ([*rates], [*rates.values()])
        assert lines["success"] == ([*range(1, 9)], [k / 100 for k in range(1, 9)])
        interval = {(step, round(bound, 6)) for step, rate in rates.items()
                    for bound in wilson(64 * rate, 64)}
        assert interval <= band(figures["success"])
        assert figures["gradient norm"].axes[0].get_yscale() == "log"
        assert "KL" not in figures

    def test_seeds_of_one_configuration_are_a_mean_with_a_band_from_lowest_to_highest(
            self, tmp_path):
        loaded = [Run(store(tmp_path / f"s{seed}", 8 - seed, seed=seed)) for seed in range(3)]
        figure = figures_of(loaded)["success"]
        steps, values = drawn(figure)["success"]
        slow = [np.mean([line["success"] for run in loaded for line in run.history
                         if line["step"] == step]) for step in range(1, 7)]
        assert (steps, values) == ([*range(1, 7)], pytest.approx(slow))  # those that all have
        assert {(1, 0.01), (1, 0.21), (6, 0.06), (6, 0.26)} <= band(figure, 2)

    def test_other_configurations_are_lines_of_the_first_metric_named_by_what_differs(
            self, tmp_path):
        """Where environment, algorithm or model differ, nearly everything does."""
        a, b, c, d = (Run(store(tmp_path / name, seed=seed, lr=lr, algo=algo))
                      for name, seed, lr, algo in (("a", 0, 1e-3, "grpo"), ("b", 1, 1e-3, "grpo"),
                                                   ("c", 0, 1e-4, "grpo"), ("d", 0, 1e-4, "ppo")))
        assert drawn(figures_of([a, b, c])["success"]).keys() == {"lr=0.001 (2)", "lr=0.0001 (1)"}
        assert [*report.configurations([a, d])] == ["algo=grpo", "algo=ppo"]

    def test_failed_environments_are_not_in_the_interval_and_holes_in_no_curve(self, tmp_path):
        folder = store(tmp_path / "a$b$")
        lines = report.read_lines(folder / "metrics.jsonl")
        for line in lines:
            line |= {"val/env_errors": 32, "val/env_errors_greedy": 8, "grad_norm": 0.0}
        lines[-2]["first_turn/mi"] = None
        (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        run = Run(folder)
        assert dict(report.facts(run))["validation, step 0"] == (
            f"success 0.500, {INTERVAL.format(*wilson(16, 32))}, 32 episodes")
        figures = figures_of([run])
        for metric, n in (("val/success", 32), ("val/success_greedy", 56)):
            assert {(0, round(bound, 6)) for bound in wilson(lines[0][metric] * n, n)} <= set.union(
                *(band(figures["success"], k) for k in range(3)))
        assert "regimes" not in figures and report.svg(figures["gradient norm"])
        assert figures["gradient norm"].axes[0].get_yscale() == "linear"

    def test_the_map_leads_through_the_regimes_and_buckets_have_the_last_measured_norms(
            self, tmp_path):
        """From a circle to a square. The limits are shares of the first values."""
        figures = figures_of([Run(store(tmp_path / "a"))])
        assert drawn(figures["regimes"])["a"] == ([1.0, 0.125], [1.875, 1.0])
        axes, = figures["regimes"].axes
        assert [(*mark.get_offsets()[0], len(mark.get_paths()[0]) > 5)
                for mark in axes.collections] == [(1.0, 1.875, True), (0.125, 1.0, False)]
        limits = [line for line in axes.lines if line.get_linestyle() == ":"]
        assert (limits[0].get_xdata()[0], limits[1].get_ydata()[0]) == (0.5, 1.875 / 4)
        assert drawn(figures["gradients by reward std"]) == {"task": ([0.1], [8])}

    def test_every_warning_of_the_run_is_marked_and_told(self, tmp_path, monkeypatch):
        monkeypatch.setattr(report, "warnings_of", lambda lines: [
            "take care"] * (lines[-1]["step"] == 5))
        run = Run(store(tmp_path / "a"))
        marks = [line.get_xdata()[0] for line in figures_of([run])["entropy"].axes[0].lines
                 if line.get_linestyle() == ":"]
        assert run.warnings == [(5, "take care")] and marks == [5]
        assert report.facts(run)[-1] == ("warning, step 5", "take care")


class TestPage:
    def test_it_tells_what_was_run_and_what_came_of_it_and_has_every_figure_as_png(self, tmp_path):
        path = report.write([store(tmp_path / "a")])
        text = html.unescape(path.read_text())
        told = dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", text))
        assert "val_size=64" in told.pop("settings")
        assert told == {
            "run": "frozenlake with grpo, model tiny, seed 0", "best validation": "0.562 at step 4",
            "regime": "compressed", "warnings": "none"} | {
                name: f"success {n / 64:.3f}, {INTERVAL.format(*wilson(n, 64))}, 64 episodes"
                for name, n in (("validation, step 0", 32), ("validation, step 8", 33),
                                ("test", 48))}
        assert not re.search("{[{%#]", text)
        names = {p.stem for p in (path.parent / "figures").iterdir()}
        assert {"success", "regimes", "gradients-by-reward-std", "entropy"} <= names
        assert len(names) == text.count("<figure>") == text.count("<svg ")

    def test_nothing_that_a_run_holds_is_markup_and_the_page_may_load_nothing(self, tmp_path):
        """Also in the legends of figures, and in a folder's name."""
        folders = [store(tmp_path / f"{HOSTILE.replace('/', '')}{i}", hostile=HOSTILE)
                   for i in range(2)]
        for i, folder in enumerate(folders):
            rewritten(folder / "config.json", lambda text, i=i: json.dumps(
                json.loads(text) | {"model": f"{i}{HOSTILE}"}))
            rewritten(folder / "metrics.jsonl", lambda text: text.replace("compressed", HOSTILE))
        pages = [report.write(folders[:1], png=False), report.write(folders, png=False)]
        stored = re.search('<script id="data".*?>(.*?)</script>', pages[0].read_text())[1]
        assert json.loads(stored) == report.read_lines(folders[0] / "trajectories.jsonl")
        for page in pages:
            tags = []
            parser = HTMLParser()
            parser.handle_starttag = lambda tag, attributes, tags=tags: tags.append(
                (tag, dict(attributes)))
            parser.feed(page.read_text())
            assert [tag for tag, _ in tags].count("script") == 2
            assert not any(tag == "img" or name.startswith("on")
                           for tag, attributes in tags for name in attributes)
            policy = [a["content"] for _, a in tags if a.get("http-equiv")]
            assert len(policy) == 1 and policy[0].startswith("default-src 'none'; ")

    def test_several_runs_share_a_page_in_the_folder_above(self, tmp_path, plain):
        path = report.write([store(tmp_path / "a"), store(tmp_path / "b", lr=1e-4)], png=False)
        assert path == tmp_path / "report.html" and path.read_text().count("<h2>") == 4

    def test_a_file_that_is_being_written_is_read_up_to_its_last_whole_line(self, tmp_path):
        """An empty one is refused."""
        folder = store(tmp_path / "a")
        rewritten(folder / "metrics.jsonl", lambda text: text + '{"step": 9, "succ')
        assert [line["step"] for line in Run(folder).history] == [*range(9)]
        rewritten(folder / "metrics.jsonl", lambda text: "")
        with pytest.raises(ValueError, match="a has no metrics yet"):
            report.write([folder])

    def test_of_a_long_run_it_leaves_out_steps_evenly_but_not_the_last(self, tmp_path, monkeypatch):
        run = Run(store(tmp_path / "a", steps=21))
        everything, said = conversations(run)
        assert said == "" and {e["step"] for e in everything} == {*range(22)}
        monkeypatch.setattr(report, "EPISODES_SIZE", 15_000)
        some, said = conversations(run)
        steps = {split: {e["step"] for e in some if e["split"] == split}
                 for split in ("train", "val")}
        assert steps == {"train": {0, 4, 8, 12, 16, 20, 21}, "val": {0, 16, 20}}
        assert said == "Only every 4th stored step fits into this page."


class TestCommand:
    def test_it_writes_the_page_of_named_runs_and_refuses_another(self, tmp_path, capsys, plain,
                                                                  monkeypatch):
        monkeypatch.chdir(tmp_path)
        for name in "abc":
            store(tmp_path / "runs" / name)
        main(["report", "a"])
        main(["report", "a b", "c"])
        assert capsys.readouterr().out == "runs/a/report.html\nruns/report.html\n"
        with pytest.raises(SystemExit, match="unknown run 'd'. Known: a, b, c."):
            main(["report", "a d"])

    def test_watching_writes_again_what_has_grown_until_ctrl_c(self, tmp_path, monkeypatch):
        folder, written = store(tmp_path / "a"), []
        monkeypatch.setattr(report, "write", lambda folders, **options: written.append(options))

        (tmp_path / "later").mkdir()
        looks = iter(["", "later", "", "a", "", None])  # which metrics grow before the next look

        def sleep(seconds):
            name = next(looks)
            if name is None:
                raise KeyboardInterrupt
            if name:
                with open(tmp_path / name / "metrics.jsonl", "a") as file:
                    file.write("{}\n")

        monkeypatch.setattr(time, "sleep", sleep)
        report.watch([folder, tmp_path / "later"])
        assert written == [{"png": False, "reload": report.RELOAD}] * 2

    def test_a_page_that_is_watched_reloads_itself_and_the_last_one_does_not(self, tmp_path, plain):
        folder = store(tmp_path / "a")
        for reload in (5, 0):
            page = report.write([folder], png=False, reload=reload).read_text()
            assert re.findall(r"setTimeout\(.*\(\), (\d+)\)", page) == ["5000"] * (reload > 0)


# ---- In a browser --------------------------------------------------------------------------------
def browse(page, script, width=1200):
    """The JSON that `script` returns inside the page, and the lines of the browser's console."""
    probe = page.with_name("probe.html")
    probe.write_text(page.read_text().replace("</body>", f"""<pre id="result"></pre><script>
        addEventListener("load", () => {{
          document.getElementById("result").textContent =
            encodeURIComponent(JSON.stringify((() => {{ {script} }})()));
        }});</script></body>"""))
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--window-size={width},900", "--dump-dom", probe.as_uri()],
        check=False, capture_output=True, text=True, timeout=60)
    result = re.search(r'<pre id="result">([^<]*)</pre>', done.stdout)[1]
    return json.loads(unquote(result)), [line for line in done.stderr.splitlines()
                                         if "CONSOLE" in line]


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium on PATH (apt-get install chromium)")
class TestBrowser:
    CARDS = """
        const get = id => document.getElementById(id);
        const texts = what => [...document.querySelectorAll(what)].map(e => e.textContent);
        const cards = () => texts("article header");
        const set = (id, value) => { get(id).value = value; get(id).onchange(); };
        const colours = () => [...document.querySelectorAll(".token")].map(e => e.style.background);
    """

    def test_every_control_does_what_it_says_and_the_console_is_silent(self, tmp_path):
        page = report.write([store(tmp_path / "a", hostile=HOSTILE)], png=False)
        found, console = browse(page, self.CARDS + """
            const seen = {title: document.title, images: document.images.length,
                          scripts: document.scripts.length};
            seen.text = document.querySelector(".message.user").textContent;
            seen.val = [cards(), get("shown").textContent];
            set("seed", "4"); seen.seed = cards();
            get("step").value = 0; get("step").oninput();
            seen.first = [cards(), get("shown").textContent, location.hash.includes("step=0")];
            set("seed", "all"); set("outcome", "failure"); seen.failure = cards();
            set("outcome", "all"); set("env", "frozenlake"); seen.env = cards();
            set("split", "train"); seen.train = cards(); seen.advantage = colours();
            set("colour", "logprob"); seen.logprob = colours();
            set("colour", "none"); seen.none = colours();
            get("step").value = 3; get("step").oninput(); seen.third = get("shown").textContent;
            seen.steps = get("step").max;
            return seen;""")
        card = "frozenlake, seed {}, member {}: {}, ended by terminated".format
        won, lost = "success, return 1.00", "failure, return 0.00"
        assert console == [] and (found["title"], found["images"]) == ("a", 0)
        assert found["scripts"] == 3 and found["text"] == f"step 0{HOSTILE}".replace("0", "8", 1)
        assert found["val"] == [[card(3, 0, won), card(4, 1, lost)], "8"]
        assert found["seed"] == [card(4, 1, lost)]
        assert found["first"] == [[card(4, 1, lost)], "0", True]
        assert found["failure"] == [card(4, 1, lost)]
        assert found["env"] == [card(3, 0, won), card(4, 1, lost)]
        assert found["train"] == [card(3, 0, won), card(3, 1, lost)]  # still at step 0
        assert found["advantage"] == ["rgba(0, 150, 60, 0.6)", "rgba(0, 150, 60, 0.3)",
                                      "rgba(210, 30, 30, 0.3)", "rgba(210, 30, 30, 0.6)",
                                      "rgba(0, 150, 60, 0.3)", "rgba(210, 30, 30, 0.3)"]
        assert found["logprob"][:3] == ["rgba(30, 90, 210, 0.1)", "rgba(30, 90, 210, 0.2)",
                                        "rgba(30, 90, 210, 0)"]
        assert found["none"] == [""] * 6
        assert (found["third"], found["steps"]) == ("3", "8")

    def test_a_page_that_reloads_stays_at_its_step_or_with_the_newest(self, tmp_path):
        page = report.write([store(tmp_path / "a")], png=False)
        (first, moved), _ = browse(page, self.CARDS + """
            const first = location.hash;
            get("step").value = 1; get("step").oninput();
            return [first, location.hash];""")
        assert "step=" not in first and "step=4" in moved

    @pytest.mark.parametrize("width", [390, 1300])
    def test_nothing_is_wider_than_the_window(self, tmp_path, width):
        page = report.write([store(tmp_path / "a", hostile="x" * 300)], png=False)
        found, _ = browse(page, "return [document.documentElement.scrollWidth, innerWidth]", width)
        assert found[0] <= found[1]

    def test_a_page_of_seventy_steps_is_below_three_megabytes_and_opens_in_two_seconds(
            self, tmp_path):
        page = report.write([store(tmp_path / "a", steps=70, size=400)], png=False)
        assert 1_500_000 < page.stat().st_size < 3_000_000
        milliseconds, _ = browse(page, "return performance.now()")
        assert milliseconds < 2000
