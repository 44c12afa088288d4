"""The page about a run: true curves, in a real browser, and nothing of a model's text is run."""

import dataclasses
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from urllib.parse import unquote

import numpy as np
import pytest
from training import changed, read_lines

from minragen.__main__ import main
from minragen.config import from_options
from minragen.look import report
from minragen.look.intervals import wilson
from minragen.look.report import Run, figures_of

HOSTILE = ("</script><script>document.title = 1</script><img src=x onerror=alert(1)>"
           "{{ 7 * 7 }}{% set x %}")
DEEP = "[" * 100_000 + "]" * 100_000
INTERVAL = "95 % interval [{:.3f}, {:.3f}]"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def store(folder, steps=8, hostile="", **options):
    """The files of a run that never was, in folder."""
    folder.mkdir(parents=True)
    config = from_options(dict(env="frozenlake", model="tiny", val_size=64) | options)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    lines, episodes = [], []
    for step in range(steps + 1):
        line = {"step": step}
        if step % 4 == 0:
            line |= {"val/success": 0.5 + step % 7 / 64}
        if step:
            line |= {"success": 0.1 * config.seed + step / 100, "entropy": 1 / step,
                     "grad_norm": step, "reward_std": 0.3, "groups_kept": 7, "seconds": 2.0}
        if step in (1, steps):
            line |= {"first_turn/conditional_entropy_per_token": 1 / step,
                     "first_turn/mi": 2 - step / 8, "gradient/bucket_1/task": step,
                     "regime": "diverse" if step == 1 else "compressed"}
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
                                 {"role": "assistant", "content": f"up{hostile}"},
                                 {"role": "user", "content": "on"},
                                 {"role": "assistant", "content": "down"}],
                    "replies": [{"tokens": [f"up{hostile}"], "logprobs": [-0.5],
                                 "advantages": [1 - 2.0 * member] * (split == "train")},
                                {"tokens": ["do", "wn"], "logprobs": [-1.0, 0.0],
                                 "advantages": [0.5, -0.5] * (split == "train")}]})
    lines.append({"step": steps, "test/success": 0.75})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "trajectories.jsonl").write_text("".join(json.dumps(e) + "\n" for e in episodes))
    return folder


def rewritten(path, change):
    path.write_text(change(path.read_text()))


def measured(folder, held_out, **options):
    """A Run whose validations are {step: successes of 64}."""
    run = Run(store(folder, **options))
    run.validated = [{"step": step, "val/success": n / 64} for step, n in held_out.items()]
    return run


def drawn(figure):
    """{name: (steps, values)} of a figure's lines."""
    return {line["name"]: (line["x"], line["y"]) for line in figure["lines"]}


def band(figure, number=0):
    """{(step, value), ...}: the corners of the shaded area of the figure's line `number`."""
    line = figure["lines"][number]
    return {(x, round(y, 6)) for bound in ("low", "high") for x, y in zip(line["x"], line[bound])}


class TestCurves:
    def test_they_are_the_metrics_and_validation_has_its_interval(self, tmp_path):
        figures = figures_of([Run(store(tmp_path / "a"))])
        lines, rates = drawn(figures["success"]), {0: 32 / 64, 4: 36 / 64, 8: 33 / 64}
        assert lines["val/success"] == ([*rates], [*rates.values()])
        assert lines["success"] == ([*range(1, 9)], [k / 100 for k in range(1, 9)])
        interval = {(step, round(bound, 6)) for step, rate in rates.items()
                    for bound in wilson(64 * rate, 64)}
        assert interval <= band(figures["success"])
        assert drawn(figures["gradient norm of groups by reward std"]) == {
            "gradient/bucket_1/task": ([1, 8], [1, 8])}
        assert "KL" not in figures

    def test_seeds_of_a_configuration_are_a_mean_in_a_band_from_lowest_to_highest(self, tmp_path):
        loaded = [Run(store(tmp_path / f"s{seed}", 8 - seed, seed=seed)) for seed in range(3)]
        figure = figures_of(loaded)["success"]
        steps, values = drawn(figure)["success"]
        slow = [np.mean([line["success"] for run in loaded for line in run.history
                         if line["step"] == step]) for step in range(1, 7)]
        assert (steps, values) == ([*range(1, 7)], pytest.approx(slow))  # those that all have
        assert {(1, 0.01), (1, 0.21), (6, 0.06), (6, 0.26)} <= band(figure, 1)

    def test_other_configurations_are_lines_of_the_first_metric_named_by_their_runs(self, tmp_path):
        loaded = [Run(store(tmp_path / name, seed=seed, lr=lr))
                  for name, seed, lr in (("a", 0, 1e-3), ("b", 1, 1e-3), ("c", 0, 1e-4))]
        assert drawn(figures_of(loaded)["success"]).keys() == {"a b", "c"}

    def test_failed_environments_are_in_no_interval_and_holes_in_no_curve(self, tmp_path):
        folder = store(tmp_path / "a$b$")
        lines = read_lines(folder / "metrics.jsonl")
        for line in lines:
            line["val/env_errors"] = 32
        lines[-2]["first_turn/mi"] = None
        (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        rewritten(folder / "metrics.jsonl", lambda text: text.replace(
            '"test/success": 0.75', '"test/env_errors": 64'))
        run = Run(folder)
        told, rate = report.facts(run), 33 / 64
        assert told["validation"] == (
            f"success {rate:.3f}, {INTERVAL.format(*wilson(rate * 32, 32))}, 32 episodes")
        assert told["test"] == "" and [line["step"] for line in run.history] == [*range(9)]
        assert {(0, round(bound, 6)) for bound in wilson(lines[0]["val/success"] * 32, 32)} <= (
            set.union(*(band(figures_of([run])["success"], k) for k in range(2))))

    def test_every_warning_of_the_run_is_marked_and_told(self, tmp_path, monkeypatch):
        monkeypatch.setattr(report, "warnings_of", lambda lines: [
            "take care"] * (lines[-1]["step"] == 5))
        run = Run(store(tmp_path / "a"))
        assert run.warnings == figures_of([run])["entropy"]["warnings"] == [(5, "take care")]
        assert report.problems(run)[-1] == "Warning at step 5: take care"

    def test_the_scripted_players_are_shown_where_they_played_with_the_same_options(self, tmp_path):
        """The better of the two shallow ones."""
        measured = json.loads((report.DATA / "players.json").read_text("utf-8"))
        row, = (row for row in measured if row["env"] == "frozenlake" and row["options"])
        random, one, other, _ = row["players"].values()
        a, b = (Run(store(tmp_path / name, env_arg=options))
                for name, options in (("a", ()), ("b", ("size=5",))))
        assert figures_of([a])["success"]["players"] == [
            ("best shallow player", max(one, other) / row["size"]),
            ("random policy", random / row["size"])]
        assert figures_of([b])["success"]["players"] == []
        assert figures_of([a, b])["success"]["players"] == []


class TestStory:
    """What happened, true also of a run that falls or stands still."""

    @pytest.mark.parametrize("held_out, told", [
        ({0: 32, 4: 48, 8: 57}, "rose from 0.50 [0.38, 0.62] at step 0 to 0.89 [0.79, 0.95] at "
                                "step 8."),
        ({0: 32, 8: 5}, "fell from 0.50 [0.38, 0.62] at step 0 to 0.08 [0.03, 0.17] at step 8."),
        ({0: 32, 4: 60, 8: 33}, "did not move measurably: 0.50 [0.38, 0.62] at step 0, 0.52 "
                                "[0.40, 0.63] at step 8. Its best was 0.94 [0.85, 0.98] at step 4; "
                                "it has fallen since."),
        ({0: 32}, "is 0.50 [0.38, 0.62] at step 0."), ({}, "has not been measured yet.")])
    def test_it_says_what_held_out_success_did_and_how_sure_that_is(self, tmp_path, held_out, told):
        assert report.story("", [measured(tmp_path / "a", held_out)]) == (
            f"Held-out success {told}")

    def test_of_several_seeds_it_tells_the_mean_as_sure_as_one_of_them(self, tmp_path):
        runs = [measured(tmp_path / f"{n}", {0: 32, 4: n, 8: n}, seed=n) for n in (56, 60)]
        assert report.story("a b", runs) == (
            "a b: held-out success, mean of 2 seeds, rose from 0.50 [0.38, 0.62] at step 0 to "
            "0.91 [{:.2f}, {:.2f}] at step 8.".format(*wilson(58, 64)))

    def test_what_still_goes_wrong_counts_failures(self, tmp_path):
        folder = store(tmp_path / "a")
        fails = "31 of 64 held-out episodes fail at step 8."
        assert report.problems(Run(folder)) == [fails, "No warnings."]
        rewritten(folder / "metrics.jsonl", lambda text: text.replace(
            '{"step": 8,', '{"step": 8, "val/valid": 0.9, "env_errors": 2,', 1))
        assert report.problems(Run(folder)) == [
            fails, "10% of the held-out turns are invalid: not in the response format, or without "
            "a valid action.", "In 2 training episodes the environment failed.", "No warnings."]


class TestPage:
    def test_it_tells_what_was_run_what_came_of_it_and_how_to_repeat_it(self, tmp_path):
        folder = store(tmp_path / "a")
        (folder / "checkpoint").mkdir()
        (folder / "checkpoint" / "manifest.json").write_text('{"commit": "1a2b3c4"}')
        text = html.unescape(report.write([folder]).read_text())
        told = dict(re.findall("<th>(.*?)</th><td>(.*?)</td>", text))
        assert "val_size=64" in told.pop("settings")
        assert told == {
            "run": "a: frozenlake with grpo, model tiny, seed 0", "commit": "1a2b3c4",
            "regime": "compressed", "time": "8 of 110 steps in 0.3 minutes",
            "to repeat it": "make reproduce RUN=a"} | {
                name: f"success {n / 64:.3f}, {INTERVAL.format(*wilson(n, 64))}, 64 episodes"
                for name, n in (("validation", 33), ("test", 48))}
        assert not re.search("{[{%#]", text)
        assert all(sentence in text for sentence in (
            report.story("", [Run(folder)]), "<li>31 of 64 held-out episodes fail at step 8."))

    def test_nothing_that_a_run_holds_is_markup_and_the_page_may_load_nothing(self, tmp_path):
        """Also in the legends of figures, and in a folder's name."""
        folders = [store(tmp_path / f"{HOSTILE.replace('/', '')}{i}", hostile=HOSTILE)
                   for i in range(2)]
        for i, folder in enumerate(folders):
            changed(folder / "config.json", model=f"{i}{HOSTILE}")
            rewritten(folder / "metrics.jsonl", lambda text: text.replace("compressed", HOSTILE))
        pages = [report.write(folders[:1]), report.write(folders)]
        for page, shown in zip(pages, (folders[:1], folders)):
            stored = re.search('<script id="data".*?>(.*?)</script>', page.read_text())[1]
            assert json.loads(stored)["episodes"] == [
                episode | {"run": folder.name} for folder in shown
                for episode in read_lines(folder / "trajectories.jsonl")]
            tags, parser = [], HTMLParser()
            parser.handle_starttag = lambda tag, attributes, tags=tags: tags.append(
                (tag, dict(attributes)))
            parser.feed(page.read_text())
            assert [tag for tag, _ in tags].count("script") == 2
            assert not any(tag == "img" or name.startswith("on")
                           for tag, attributes in tags for name in attributes)
            policy = [a["content"] for _, a in tags if a.get("http-equiv")]
            assert len(policy) == 1 and policy[0].startswith("default-src 'none'; ")

    def test_several_runs_share_a_page_in_the_folder_above(self, tmp_path):
        loaded = [store(tmp_path / "a"), store(tmp_path / "b", lr=1e-4)]
        path = report.write(loaded)
        text = html.unescape(path.read_text())
        assert path == tmp_path / "report.html" and text.count("held-out success ") == 2
        rows = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", text)]
        assert [*zip(*rows)] == [tuple(filter(None, report.facts(Run(folder)).values()))
                                 for folder in loaded]

    def test_a_run_without_metrics_is_refused(self, tmp_path):
        folder = store(tmp_path / "a")
        rewritten(folder / "metrics.jsonl", lambda text: '{"step": 9, "succ')
        with pytest.raises(ValueError, match="a has no metrics yet"):
            report.write([folder])

    def test_of_a_long_run_it_leaves_out_steps_evenly_but_not_the_first_or_the_last(self, tmp_path):
        run = Run(store(tmp_path / "a", steps=21))
        everything = run.conversations(2_000_000)
        assert run.left_out == [] and {e["step"] for e in everything} == {*range(22)}
        some = run.conversations(1 + len(json.dumps(run.episodes)) // 4)
        steps = {split: {e["step"] for e in some if e["split"] == split}
                 for split in ("train", "val")}
        assert steps == {"train": {0, 4, 8, 12, 16, 20, 21}, "val": {0, 8, 20}}
        assert run.left_out == ["the conversations of all but one in 4 steps"]


class TestDamage:
    """The files of a run may be damaged, or come from elsewhere."""

    def test_a_page_shows_what_can_be_read_and_tells_how_many_lines_cannot(self, tmp_path):
        folder = store(tmp_path / "a")
        for name, least in (("metrics.jsonl", '{"step"'), ("trajectories.jsonl", '{"step": 1}')):
            with open(folder / name, "ab") as file:
                for line in (least, DEEP, "7", "[]", "{}", "\0\udcff"):
                    file.write(f"{line}\n".encode(errors="surrogateescape"))
        page = report.write([folder]).read_text()
        assert ("Left out of a: 6 lines of metrics.jsonl, which cannot be read; 6 lines of "
                "trajectories.jsonl, which cannot be read.") in page and "31 of 64" in page

    @pytest.mark.parametrize("change", [
        {"env": "nowhere"}, {"env": "frozenlake=1,bandit"}, {"algo": "nowhere:preset"},
        {"response_format": "none"}, {"val_size": -5}, {"env_arg": ["size=99999"]}])
    def test_a_config_that_cannot_be_played_has_a_page(self, tmp_path, change):
        folder = store(tmp_path / "a")
        changed(folder / "config.json", **change)
        (folder / "checkpoint").mkdir()
        (folder / "checkpoint" / "manifest.json").write_text(DEEP)
        assert "31 of 64" in report.write([folder]).read_text() or "val_size" in change


class TestCommand:
    def test_it_writes_a_page_of_named_runs_and_refuses_others(self, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for name in "abc":
            store(tmp_path / "runs" / name)
        main(["report", "a"])
        main(["report", "a b", "c"])
        assert capsys.readouterr().out == "runs/a/report.html\nruns/report.html\n"
        with pytest.raises(SystemExit, match="unknown run 'd'. Known: a, b, c."):
            main(["report", "a d"])


# ---- In a browser --------------------------------------------------------------------------------
def browse(page, script):
    """The JSON that `script` returns inside the page, and the lines of the browser's console."""
    probe = page.with_name("probe.html")
    probe.write_text(page.read_text().replace("</body>", f"""<pre id="result"></pre><script>
        addEventListener("load", () => {{
          document.getElementById("result").textContent =
            encodeURIComponent(JSON.stringify((() => {{ {script} }})()));
        }});</script></body>"""))
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         "--window-size=1200,900", "--dump-dom", probe.as_uri()],
        check=False, capture_output=True, text=True, timeout=60)
    result = re.search(r'<pre id="result">([^<]*)</pre>', done.stdout)[1]
    return json.loads(unquote(result)), [line for line in done.stderr.splitlines()
                                         if "CONSOLE" in line]


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium on PATH (apt-get install chromium)")
class TestBrowser:
    CARDS = """
        const get = id => document.getElementById(id);
        const texts = what => [...document.querySelectorAll(what)].map(e => e.textContent);
        const cards = () => texts("#episodes header");
        const set = (id, value) => { get(id).value = value; get(id).onchange(); };
        const colours = () => [...document.querySelectorAll("#episodes .token")].map(
          e => e.style.background);
        const figure = title => [...document.querySelectorAll("figure")].find(
          e => e.querySelector("b").textContent === title);
    """

    def test_figures_and_controls_do_what_they_say_and_the_console_is_silent(self, tmp_path):
        """A figure's legend has the last values, and those of the step under the pointer."""
        folder = store(tmp_path / "a", hostile=HOSTILE)
        found, console = browse(report.write([folder]), self.CARDS + """
            const plot = figure("entropy").querySelector(".plot");
            const legend = () => figure("entropy").querySelector(".legend").textContent;
            const seen = {title: document.title, images: document.images.length,
                          scripts: document.scripts.length};
            seen.text = document.querySelector("#episodes .message.user").textContent;
            seen.val = [cards(), get("shown").textContent];
            set("seed", "4"); seen.seed = cards();
            get("step").value = 0; get("step").oninput();
            seen.first = [cards(), get("shown").textContent];
            set("seed", "all"); set("outcome", "failure"); seen.failure = cards();
            set("outcome", "all"); set("env", "frozenlake"); seen.env = cards();
            set("split", "train"); seen.train = cards(); seen.advantage = colours();
            set("colour", "none"); seen.none = colours();
            get("step").value = 3; get("step").oninput(); seen.third = get("shown").textContent;
            seen.steps = get("step").max;
            seen.figures = texts("figure b"); seen.legends = [legend()];
            plot.onpointermove({
              clientX: plot.getBoundingClientRect().left + 0.5 * plot.clientWidth});
            seen.legends.push(legend());
            return seen;""")
        card = "frozenlake, seed {}, member {}: {}, ended by terminated".format
        won, lost = "success, return 1.00", "failure, return 0.00"
        assert console == [] and (found["title"], found["images"]) == ("a", 0)
        assert found["scripts"] == 3 and found["text"] == f"step 0{HOSTILE}".replace("0", "8", 1)
        assert found["val"] == [[card(3, 0, won), card(4, 1, lost)], "8"]
        assert found["seed"] == [card(4, 1, lost)]
        assert found["first"] == [[card(4, 1, lost)], "0"]
        assert found["failure"] == [card(4, 1, lost)]
        assert found["env"] == [card(3, 0, won), card(4, 1, lost)]
        assert found["train"] == [card(3, 0, won), card(3, 1, lost)]  # still at step 0
        assert found["advantage"] == ["rgba(0, 150, 60, 0.6)", "rgba(0, 150, 60, 0.3)",
                                      "rgba(210, 30, 30, 0.3)", "rgba(210, 30, 30, 0.6)",
                                      "rgba(0, 150, 60, 0.3)", "rgba(210, 30, 30, 0.3)"]
        assert found["none"] == [""] * 6
        assert (found["third"], found["steps"]) == ("3", "8")
        assert sorted(found["figures"]) == sorted(figures_of([Run(folder)]))
        assert found["legends"] == ["entropy— entropy 0.125", "entropy— entropy 0.25step 4"]

    def test_the_same_instance_before_and_after_stands_side_by_side_with_its_images(self, tmp_path):
        """First the one that was learned. The prompt is folded, the image beside what was said."""
        folder = store(tmp_path / "a")
        rewritten(folder / "trajectories.jsonl", lambda text: "".join(json.dumps(e | {
            "success": e["success"] or e["step"] == 8,
            "images": ["data:image/png;base64,AAAA", "data:image/png;base64,BBBB"],
            "messages": [m | {"content": f"<image>\n{m['content']}"} if m["role"] == "user" else m
                         for m in e["messages"]]}) + "\n" for e in map(
                             json.loads, text.splitlines())))
        found, console = browse(report.write([folder]), self.CARDS + """
            const seen = {options: texts("#pair option"), chosen: get("pair").value,
                          cards: texts("#pairs header")};
            const turn = document.querySelector("#pairs .turn");
            seen.turn = [turn.querySelector("img").src, turn.querySelector(".message").textContent];
            seen.open = document.querySelector("#pairs details").open;
            get("pair").value = 0; get("pair").onchange(); seen.other = texts("#pairs header");
            return seen;""")
        assert [line for line in console if "AAAA" not in line and "BBBB" not in line] == []
        assert found["options"] == ["a, frozenlake seed 3: success, then success",
                                    "a, frozenlake seed 4: failure, then success"]
        assert found["chosen"] == "1" and not found["open"]
        form = "step {}: frozenlake, seed {}, member {}: {}, ended by terminated".format
        assert found["cards"] == [form(0, 4, 1, "failure, return 0.00"),
                                  form(8, 4, 1, "success, return 0.00")]
        assert found["turn"] == ["data:image/png;base64,AAAA", "step 0"]
        assert found["other"] == [form(step, 3, 0, "success, return 1.00") for step in (0, 8)]
