"""Files on disk: the folder of cached results, and the records that a user gives to an environment.

Differences from RAGEN: RAGEN's environments download named data sets as they start. Here an
environment reads a local file and refuses it at the start if it cannot be used.
"""

import gzip
import json
import os
import zlib
from pathlib import Path


def cache_folder():
    """The folder for results that are made once: converted models, warm-up weights, Lean's prelude.

    It is $MINRAGEN_CACHE or ~/.cache/minragen, as an absolute path: Lean runs in another folder.
    """
    folder = os.environ.get("MINRAGEN_CACHE") or Path.home() / ".cache" / "minragen"
    return Path(folder).absolute()


def read_records(path):
    """The records of a user's JSONL file (.gz or not), JSON file (one list) or parquet file.

    raises: ValueError for a file that is missing, broken or empty, or for a parquet file where
        pyarrow is not installed
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
        raise ValueError(f"reading {path} needs the package pyarrow: run `pip install pyarrow`, "
                         f"or convert the file to JSONL.") from None
    # Another format, not UTF-8, not readable, or nested too deeply.
    except (ValueError, OSError, EOFError, zlib.error, RecursionError) as error:
        line = f"line {number} of " if number else ""
        first_line = str(error).partition("\n")[0]
        raise ValueError(f"cannot read {line}{path}, expected JSONL, JSON or parquet: "
                         f"{first_line}") from None
    if not records:
        raise ValueError(f"no records in {path!r}: expected at least one.")
    return records
