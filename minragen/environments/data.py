"""The package's own data, the folder of cached results, and the records of a user."""

import functools
import gzip
import io
import json
import os
import sys
import zlib
from pathlib import Path

from tqdm import tqdm

DATA = Path(__file__).parent.parent / "data"  # what the package brings along
# A bar on stderr for what takes more than 5 seconds.
watched = functools.partial(tqdm, delay=5, mininterval=1, leave=False)


def load_table(name, **how):
    """The content of a JSON file of the package. how: for json.loads"""
    return json.loads((DATA / name).read_text("utf-8"), **how)


def cache_folder():
    """$MINRAGEN_CACHE or ~/.cache/minragen: converted models, warm-up weights, Lean's prelude."""
    folder = os.environ.get("MINRAGEN_CACHE") or Path.home() / ".cache" / "minragen"
    return Path(folder).absolute()  # Lean runs in another folder


def cached_until_changed(load):
    """Cache `load(*paths)` until one of the files has another size or time of change."""
    cached = functools.lru_cache(maxsize=8)(lambda _versions, *paths: load(*paths))
    return lambda *paths: cached(tuple(
        os.path.isfile(path) and (os.path.getmtime(path), os.path.getsize(path))
        for path in paths), *paths)


def refuse_with(env, data, *names):
    """Raise ValueError if the option `data` replaces the bundled data, but one of the options
    `names`, which shape the bundled data alone, is not its default."""
    for name in names:
        if env.options[data] and env.options[name] != env.defaults[name]:
            raise ValueError(f"option {name} of {type(env).__name__}: it shapes the bundled data, "
                             f"which {data} replaces. Leave it out.")


def fitted(text, most, space):
    """`text` cut at `most` characters, with ? for characters outside of the observation space."""
    text = text if len(text) <= most else f"{text[:most]}..."
    return "".join(c if c in space.character_set else "?" for c in text)


def read_each(path, build, refusal, useless="of no use"):
    """build(record) of each record of a file, without those that are None: their number is printed,
    with the reason `useless`. Raises ValueError for a record that `build` cannot read, with the
    text `refusal`, which may name {path}, {number} and {problem}."""
    built = []
    for number, record in enumerate(watched(read_records(path), desc=f"reading {path}"), 1):
        try:
            built.append(build(record))
        except (LookupError, TypeError, ValueError, AttributeError, zlib.error) as problem:
            raise ValueError(refusal.format(path=path, number=number, problem=problem)) from None
    kept = tuple(made for made in built if made is not None)
    if len(kept) < len(built):
        tqdm.write(f"{path}: {len(built) - len(kept):,} of {len(built):,} records left out: "
                   f"{useless}.", file=sys.stderr)
    return kept


def read_records(path):
    """Yield the records of a JSONL file (.gz or not), a JSON file (one list) or a parquet file.

    raises: ValueError if the file is missing, broken or empty, or needs pyarrow
    """
    file, count = Path(path), 0
    if not file.is_file():
        raise ValueError(f"no file {path!r}: expected a JSONL, JSON or parquet file.")
    try:
        if file.suffix == ".parquet":
            from pyarrow import parquet
            records = (record for batch in parquet.ParquetFile(file).iter_batches()
                       for record in batch.to_pylist())
        else:
            records = read_json(file)
        for count, record in enumerate(records, 1):  # noqa: B007 (in the error)
            yield record
    except ImportError:
        raise ValueError(f"{path} needs pyarrow: run `pip install pyarrow`, or convert the file to "
                         f"JSONL.") from None
    except Exception as error:  # not this format, not readable, a type that pyarrow lacks, ...
        place = f"record {count + 1} of {path}" if count else path
        reason = str(error).partition("\n")[0]
        raise ValueError(f"cannot read {place} as JSONL, JSON or parquet: {reason}.") from None
    if not count:
        raise ValueError(f"no records in {path!r}: expected at least one.")


def read_json(file):
    """Yield the records of a JSONL file (.gz or not), or of a JSON file that holds one list."""
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as data:
        # Only \n ends a line: JSON strings may hold other separators, such as U+2028.
        lines = io.TextIOWrapper(data, "utf-8-sig", newline="\n")
        for line in filter(str.strip, lines):
            if line.lstrip().startswith("["):  # the file is one list
                yield from json.loads(line + lines.read())
            else:
                yield json.loads(line)
