"""The package's own data, the folder of cached results, and the records of a user.

Difference from RAGEN: environments read local files. RAGEN's download named data sets.
"""

import functools
import gzip
import json
import os
import zlib
from pathlib import Path

DATA = Path(__file__).parent.parent / "data"  # what the package brings along


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
    return lambda *paths: cached(tuple(map(_version, paths)), *paths)


def _version(path):
    return os.path.isfile(path) and (os.path.getmtime(path), os.path.getsize(path))


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


def read_each(path, build, refusal):
    """build(record) of each record of a file. Raises ValueError for one that it cannot use: the
    text `refusal`, which may name {path}, {number} and {problem}."""
    built = []
    for number, record in enumerate(read_records(path), 1):
        try:
            built.append(build(record))
        except (LookupError, TypeError, ValueError, AttributeError, zlib.error) as problem:
            raise ValueError(refusal.format(path=path, number=number, problem=problem)) from None
    return tuple(built)


def read_records(path):
    """The records of a JSONL file (.gz or not), a JSON file (one list) or a parquet file.

    raises: ValueError if the file is missing, broken or empty, or needs pyarrow
    """
    file, number = Path(path), 0
    if not file.is_file():
        raise ValueError(f"no file {path!r}: expected a JSONL, JSON or parquet file.")
    try:
        if file.suffix == ".parquet":
            from pyarrow import parquet
            records = parquet.read_table(file).to_pylist()
        else:
            data = file.read_bytes()
            text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
            if text.lstrip().startswith("["):
                records = json.loads(text)
            else:
                records = []
                # Not splitlines(): JSON strings may hold other line separators such as U+2028.
                for number, line in enumerate(text.split("\n"), 1):  # noqa: B007 (in the error)
                    if line.strip():
                        records.append(json.loads(line))
    except ImportError:
        raise ValueError(f"{path} needs pyarrow: run `pip install pyarrow`, or convert the file to "
                         f"JSONL.") from None
    # Another format, not UTF-8, not readable, nested too deeply, or a type that pyarrow lacks.
    except (ValueError, OSError, EOFError, zlib.error, RecursionError, NotImplementedError,
            ArithmeticError, LookupError, MemoryError) as error:
        place = f"line {number} of {path}" if number else path
        reason = str(error).partition("\n")[0]
        raise ValueError(f"cannot read {place} as JSONL, JSON or parquet: {reason}.") from None
    if not records:
        raise ValueError(f"no records in {path!r}: expected at least one.")
    return records
