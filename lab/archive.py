"""The runs that the pages' numbers come from: one file, lab/results/runs.zip.

    .venv/bin/python -m lab.archive                   list them
    .venv/bin/python -m lab.archive NAME ...          unpack some of them into runs/
    .venv/bin/python -m lab.archive --add NAME ...    put runs of runs/ into the file

`make report` and `make reproduce` unpack the runs that they are asked for. Of each run the file has
config.json, metrics.jsonl, and in trajectories.jsonl the episodes of the first and of the last
validation. Equal runs make an equal file.
"""

import argparse
import json
import zipfile
from fnmatch import filter as matching
from pathlib import Path

from minragen.run import runs
from minragen.support.options import nearest

ARCHIVE = Path(__file__).parent / "results" / "runs.zip"
FILES = ("config.json", "metrics.jsonl", "trajectories.jsonl")


def names(pattern="*"):
    """The names of the stored runs that match a pattern such as "lora-r8-s?", sorted."""
    return matching(sorted(folder.name for folder in zipfile.Path(ARCHIVE).iterdir()), pattern)


def config(name):
    """The Config of a stored run."""
    return runs.read_config(zipfile.Path(ARCHIVE, f"{name}/"))


def metrics(name):
    """The lines of a stored run's metrics.jsonl."""
    return lines(name, "metrics.jsonl")


def episodes(name):
    """The lines of a stored run's trajectories.jsonl."""
    return lines(name, "trajectories.jsonl")


def lines(name, file):
    text = zipfile.Path(ARCHIVE, f"{name}/{file}").read_text("utf-8")
    return list(map(json.loads, text.splitlines()))


def unpack(name):
    """Write a stored run into runs/, unless runs/ has one of that name. Returns its folder."""
    folder = runs.RUNS / name
    if not folder.exists():
        folder.mkdir(parents=True)
        for file in zipfile.Path(ARCHIVE, f"{name}/").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def add(name):
    """Put a run of runs/ into the file, in the place of a stored one of that name."""
    with zipfile.ZipFile(ARCHIVE) as archive:
        contents = {entry: archive.read(entry) for entry in archive.namelist()
                    if not entry.startswith(f"{name}/")}
    for file in FILES:
        if (path := runs.RUNS / name / file).exists():
            contents[f"{name}/{file}"] = (
                validations(path) if file == "trajectories.jsonl" else path.read_bytes())
    with zipfile.ZipFile(ARCHIVE, "w") as archive:
        for entry, content in sorted(contents.items()):
            archive.writestr(zipfile.ZipInfo(entry), content, zipfile.ZIP_DEFLATED, 9)


def validations(path):
    """The bytes of a trajectories.jsonl with the first and the last validation alone."""
    told = [line for line in path.read_bytes().splitlines(keepends=True)
            if json.loads(line)["split"] == "val"]
    steps = [json.loads(line)["step"] for line in told]
    return b"".join(line for line, step in zip(told, steps) if step in (min(steps), max(steps)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", help="a run; none: list them")
    parser.add_argument("--add", action="store_true", help="from runs/ into the file")
    args = parser.parse_args()
    for name in args.name:
        if args.add:
            add(name)
        elif name in names():
            unpack(name)
        else:
            own = [path.parent.name for path in runs.RUNS.glob("*/config.json")]
            parser.error(nearest("run", name, sorted({*own, *names()})))
    if not args.name:
        print(*names(), sep="\n")


if __name__ == "__main__":
    main()
