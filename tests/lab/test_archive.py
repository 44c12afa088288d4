"""The stored runs: one file that commands of one's own runs can read."""

import json

import pytest

from lab import archive
from minragen.look import report
from minragen.run import runs as folders

RUN = "frozenlake-grpo-s0"


@pytest.mark.usefixtures("runs", "drawn")
class TestArchive:
    def test_a_stored_run_becomes_one_of_runs_that_the_report_can_show(self):
        folder = archive.unpack(RUN)
        assert folders.load_config(RUN) == archive.config(RUN)
        page = report.write([folder]).read_text("utf-8")
        assert RUN in page and f"{archive.metrics(RUN)[-1]['test/success']:.2f}" in page
        (folder / "config.json").write_text("mine")
        assert archive.unpack(RUN) == folder and (folder / "config.json").read_text() == "mine"

    def test_a_run_that_is_nowhere_is_refused_with_the_nearest_name(self, monkeypatch, capsys):
        monkeypatch.setattr("sys.argv", ["", "frozenlake-grp-s0"])
        with pytest.raises(SystemExit):
            archive.main()
        assert f"did you mean '{RUN}'" in capsys.readouterr().err

    def test_what_is_put_in_comes_out_and_other_runs_stay(self, tmp_path, monkeypatch):
        copied = tmp_path / "runs.zip"
        copied.write_bytes(archive.ARCHIVE.read_bytes())
        monkeypatch.setattr(archive, "ARCHIVE", copied)
        folder = archive.unpack(RUN)
        told = [dict(step=step, split=split, seed=step) for step, split in (
            (0, "val"), (1, "train"), (5, "val"), (5, "train"), (9, "val"), (9, "val"))]
        (folder / "trajectories.jsonl").write_text("\n".join(map(json.dumps, told)))
        before = archive.names(), archive.metrics("lora-r8-s0")
        archive.add(RUN)
        once = copied.read_bytes()
        archive.add(RUN)
        assert copied.read_bytes() == once
        assert archive.episodes(RUN) == [told[0], *told[-2:]]
        assert (archive.names(), archive.metrics("lora-r8-s0")) == before
        assert archive.names("lora-r8-s?") == ["lora-r8-s0", "lora-r8-s1", "lora-r8-s2"]
