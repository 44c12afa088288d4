"""Names and options as people type them: how they are read, checked and refused.

Tests: `python -m pytest tests/test_config.py tests/test_envs.py`.
"""

import ast
import difflib
import importlib
import os
import sys
import tomllib
from pathlib import Path


def data_table(name):
    """The file minragen/data/NAME.toml as a dictionary."""
    return tomllib.loads((Path(__file__).parents[1] / "data" / f"{name}.toml").read_text("utf-8"))


NOT_OF_ALGO = {"env", "run", "seed", "algo", "model", "response_format"}
REMOVED = data_table("removed")  # {removed option: [[values that did nothing], what to do now]}


def nearest(kind, name, known):
    """The sentence for an unknown name: what was given, the likely meaning, the known names."""
    likely = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f": did you mean {likely[0]!r}?" if likely else "."
    shown = known if len(known) <= 10 else difflib.get_close_matches(name.lower(), known, 5, 0)
    more = f" and {len(known) - len(shown)} more" if len(shown) < len(known) else ""
    return f"unknown {kind} {name!r:.101}{hint} Known: {', '.join(shown) or 'none'}{more}."


def short(value):
    """The value as tables and first lines show it: a folder's name instead of its path."""
    is_path = isinstance(value, str) and (os.path.isdir(value) or value.startswith(("/", ".")))
    return os.path.basename(os.path.abspath(value)) if is_path else value


def unknown_option(name, known):
    """The sentence for an unknown option: what replaces a removed one, or the nearest name."""
    if said := REMOVED.get(name.lstrip("-").replace("-", "_")):
        return f"unknown option {name!r}: commit 5892899 has it; now {said[1]}."
    return nearest("option", name, known) + " See --help."


def check_options(owner, defaults, options, ranges):
    """The defaults, replaced by `options`. Raises ValueError for unknown names and wrong values."""
    checked = dict(defaults)
    for name, value in options.items():
        if name not in defaults:
            raise ValueError(nearest(f"option of {owner}", name, sorted(defaults)))
        want = type(defaults[name])
        checked[name] = float(value) if want is float and type(value) is int else value
        if type(checked[name]) is not want or (want is float and not abs(checked[name]) < 1e9):
            raise ValueError(f"option {name} of {owner}: got {value!r}, expected {want.__name__} "
                             f"such as {defaults[name]!r}.")
        allowed = ranges.get(name, [value])
        few = isinstance(allowed, list)
        if not (value in allowed if few else allowed[0] <= value <= allowed[1]):
            expected = (" or " if few else " to ").join(map(str, allowed))
            raise ValueError(f"option {name} of {owner}: got {value!r}, expected {expected}.")
    return checked


def in_module(kind, name, what):
    """The attribute that `package.module:attribute` names, in a module of the user; None if the
    module has none of this name.

    kind, what: for messages, such as "env" and "Class"
    raises: ValueError for a bad name, ImportError naming the missing module
    """
    module, _, attribute = name.rpartition(":")
    if not module.strip(".") or module.startswith(".") or not attribute:
        raise ValueError(f"bad {kind} {name!r}: expected package.module:{what}.")
    if "" not in sys.path:  # unlike `-m`, a console entry point skips the current folder
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as problem:
        if not f"{module}.".startswith(f"{problem.name}."):
            raise  # what the module itself imports
        raise ImportError(f"{kind} {name}: there is no module {problem.name!r} in the current "
                          f"folder or among the installed packages.") from None


def algo_options(algo, known, defaults):
    """The options {name: value} of an algorithm: a preset among `known`, or `module:preset`, a
    dictionary of the user. Its module may add to starpo.ESTIMATORS and FILTERS when it is imported.

    defaults: {name: value} of all options; those of NOT_OF_ALGO are refused in a dictionary
    raises: ValueError for an unknown name, and for unknown options or wrong types in it
    """
    if algo in known:
        return known[algo]
    if ":" not in algo:
        raise ValueError(nearest("algo", algo, list(known)))
    found = in_module("algo", algo, "preset")
    if not isinstance(found, dict):
        raise ValueError(f"algo {algo!r} names no dictionary of options.")
    free = {name: value for name, value in defaults.items() if name not in NOT_OF_ALGO}
    checked = check_options(f"algo {algo}", free, found, {})
    return {name: checked[name] for name in found}


def parse_options(texts, kind="env_arg"):
    """["size=8", "bandit.mixed=true"] -> {"size": 8, "bandit.mixed": True}. Raises ValueError."""
    options = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"bad {kind} {text!r}: expected name=value.")
        try:
            options[name] = ast.literal_eval(
                value.capitalize() if value in ("true", "false") else value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            options[name] = value  # a text
    return options


def parse_mixture(spec, num_groups, known):
    """Divide the groups among environments: `frozenlake,bandit` evenly, `frozenlake=24,bandit=8`
    as given. Returns [(name, number of groups), ...].

    known: names for the message about an empty spec
    raises: ValueError if the numbers are incomplete or do not add up to num_groups
    """
    parts = [p.strip() for p in spec.split(",") if p.strip()]
    if not parts:
        raise ValueError(f"empty env: got {spec!r}. Known: {', '.join(sorted(known))}.")
    names, _, counts = zip(*([word.strip() for word in p.partition("=")] for p in parts))
    if not any(counts):
        base, extra = divmod(num_groups, len(parts))
        numbers = [base + (i < extra) for i in range(len(parts))]
    elif all(c.isdecimal() for c in counts):
        numbers = [int(c) for c in counts]
    else:
        raise ValueError(f"bad mixture {spec!r}: expected a number for every environment or none.")
    if sum(numbers) != num_groups or min(numbers) < 1:
        raise ValueError(f"bad mixture {spec!r}: {numbers} groups, expected {num_groups} in all "
                         f"and at least one each. Change the numbers or --num-groups.")
    return list(zip(names, numbers))


def options_of(name, options, names):
    """The options for one environment of a mixture: `option` is for all, `name.option` for one.

    names: of all environments in the mixture
    """
    mine = {}
    for key, value in sorted(options.items(), key=lambda item: "." in item[0]):  # `name.` wins
        owner, dot, option = key.rpartition(".")
        if dot and owner not in names:
            raise ValueError(nearest("env in an option", owner, sorted(names)))
        if option in ("self", "name", "split", "budget", "render_mode", "layers"):
            raise ValueError(f"{option!r} is not an option of an environment.")
        if not dot or owner == name:
            mine[option] = value
    return mine
