"""What a linter does not see: forbidden imports, dead links, options that nothing reads.

Each function returns its faults in sentences. `make check` and tests/test_project.py run them.
"""

import ast
import dataclasses
import pkgutil
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from minragen.config import Config  # noqa: E402  the line above finds it
from minragen.envs import REGISTRY  # noqa: E402

# The reading list in its order, and which of it each may import; all may import support/.
READING = {
    "nano": {"chat", "envs", "models"},
    "train": {"starpo", "chat", "models", "rollout", "trajectory", "config"},
    "rollout": {"trajectory", "cache"}, "trajectory": {"envs"}, "starpo": set(),
    "chat": {"envs", "trajectory"}, "models": {"starpo", "cache"}, "cache": set(), "envs": set(),
    "config": {"envs"}, "eval": set()}
SUPPORT = {"options": set(), "checks": {"starpo"}, "formats": {"support.options"},
           "template": set(), "noise": set(), "metrics": {"trajectory"}}
ALONE = ("starpo", "cache")  # import nothing of ours
# The wings that each may import inside of main(), or, for the command of evaluation, anywhere.
IN_MAIN = {"train": {"run.start"}, "nano": {"run.bundled"}}
COMMANDS = ("eval", "__main__")
# wing -> wings that it may import, beside the list and support/ (environments: envs, options)
BELOW = {"environments": {"environments"}, "more": {"more"}, "fast": {"fast"},
         "look": {"look", "more", "fast", "environments"},
         "run": {"environments", "fast", "more", "look", "run"}}
# They read only what knows nothing of them: runs' folders; how a server is asked, how long.
STORED = {"look/report": {"run.runs"}, "more/api": {"environments.limits", "environments.search"}}
# What a reader was promised: files, lines at most.
SIZES = {"the reading list": ("minragen/*.py", 3030), "support/": ("minragen/support/*.py", 650),
         "nano.py": ("minragen/nano.py", 200), "rollout.py": ("minragen/rollout.py", 260),
         "starpo.py": ("minragen/starpo.py", 480), "the package": ("minragen/**/*.py", 14784),
         "the tests": ("tests/**/*.py", 16500)}
LONGEST = 480  # lines of a file of the reading list
OPTIONS = 72


def imported(source, texts=False):
    """The modules of minragen that a source imports, lazily or not, without the package's name;
    with `texts` also those that a text names, such as "minragen.run.start:main"."""
    found, tree = set(), ast.parse(source)
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            packages = {"minragen", "minragen.support", *(f"minragen.{wing}" for wing in BELOW)}
            found |= ({f"{node.module}.{alias.name}" for alias in node.names}
                      if node.module in packages else {node.module or "."})
        elif texts and isinstance(node, ast.Constant) and id(node) not in told:
            found |= {match for match in re.findall(r"\bminragen\.(?:\w+\.)?\w+", str(node.value))
                      if match.split(".")[1] in BELOW}
    return {name.removeprefix("minragen.") for name in found if re.match(r"minragen|\.", name)}


def forbidden_imports(root=ROOT):
    faults = []
    for path in sorted((root / "minragen").rglob("*.py")):
        module = path.relative_to(root / "minragen").with_suffix("").as_posix()
        wing, source = module.partition("/")[0], path.read_text()
        if re.search(r"^\s*(from|import) (lab|tests|examples)\b", source, re.MULTILINE):
            faults.append(f"minragen/{module}.py imports what is not installed with it")
        for name in sorted(imported(source, texts=wing not in BELOW)):
            house, supported = name.partition(".")[0], name.startswith("support")
            if wing == "environments":
                allowed = house == "environments" or name in ("envs", "support.options")
            elif wing in BELOW:
                allowed = (house in {*READING, "support", *BELOW[wing]}
                           or name in STORED.get(module, ()))
            elif wing == "support":
                allowed = name in SUPPORT.get(path.stem, ())
            elif module in COMMANDS:
                allowed = True
            else:
                allowed = (name in READING.get(module, ())
                           or supported and module not in ALONE
                           or name in IN_MAIN.get(module, ()) and only_in_main(source, name)
                           or module == "envs" and name.startswith("environments"))  # the registry
            if not allowed:
                faults.append(f"minragen/{module}.py imports minragen.{name}")
    return faults


def only_in_main(source, name):
    """Whether a source imports a module inside of its function `main` alone."""
    rest = [node for node in ast.parse(source).body if getattr(node, "name", "") != "main"]
    return name not in imported(ast.unparse(ast.Module(rest, [])), texts=True)


def circles(root=ROOT):
    """Modules that import each other, at module level or inside a function."""
    package = root / "minragen"
    graph = {path.relative_to(package).with_suffix("").as_posix().replace("/", "."):
             imported(path.read_text()) for path in package.rglob("*.py")}

    def reached(start):
        seen, left = set(), [start]
        while left:
            for name in graph.get(left.pop(), ()):
                if name not in seen and name != "envs":  # the registry of envs.py is data
                    seen.add(name)
                    left.append(name)
        return seen

    lazy = set().union(*IN_MAIN.values()) | {"eval", "__main__"}
    return [f"minragen.{name} imports itself through others" for name in sorted(graph)
            if name in reached(name) and not reached(name) & lazy]


def sizes(root=ROOT):
    """What has grown beyond what a reader was promised."""
    found = [(part, files_of(root, files), most) for part, (files, most) in SIZES.items()]
    found += [(f"{name}.py", files_of(root, f"minragen/{name}.py"), LONGEST) for name in READING]
    faults = [f"{part}: {lines} lines, expected at most {most}"
              for part, lines, most in found if lines > most]
    options = len(dataclasses.fields(Config))
    if options > OPTIONS:
        faults.append(f"{options} options, expected at most {OPTIONS}")
    return faults


def files_of(root, pattern):
    """The lines of all files that match a pattern."""
    return sum(len(path.read_text().splitlines()) for path in root.glob(pattern))


def dead_links(root=ROOT):
    """Links of the pages to files and headings that are not there."""
    faults = []
    for page in [*root.glob("*.md"), *(root / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            file, _, heading = link.partition("#")
            target = page.parent / file if file else page
            if re.match(r"\w+:", link):  # elsewhere
                continue
            if not target.exists():
                faults.append(f"{page.name} links to {link}, which does not exist")
            elif heading and heading not in headings(target):
                faults.append(f"{page.name} links to {link}, but the page has no such heading")
    return faults


def headings(page):
    """The anchors of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def unread_options(root=ROOT):
    """Fields of Config and options of environments that no code looks at."""
    # Of config.py only what builds the environments: its checks, and checks.py, read any option.
    code = "\n".join(path.read_text().rpartition("The environments of a Config")[2]
                     for path in (root / "minragen").rglob("*.py")
                     if "environments" not in path.parts and path.stem != "checks")
    faults = [f"option {f.name} is never read" for f in dataclasses.fields(Config)
              if not re.search(rf"\.{f.name}\b|\"{f.name}\"[,)]", code)]
    for env, path in REGISTRY.items():
        code = "".join((root / "minragen" / "environments" / f"{name}.py").read_text()
                       for name in (env, "board"))
        nodes = list(ast.walk(ast.parse(code)))  # an option is read by its key or into a variable
        read = [getattr(node, "id", getattr(node, "value", None)) for node in nodes
                if isinstance(node, (ast.Name, ast.Constant))]
        faults += [f"option {name} of {env} is never read"
                   for name in pkgutil.resolve_name(path).defaults if read.count(name) < 2]
    return faults


if __name__ == "__main__":
    found = [*forbidden_imports(), *circles(), *sizes(), *dead_links(), *unread_options()]
    print("\n".join(found) or "imports, links and options are in order")
    sys.exit(bool(found))
