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

WINGS = ("environments", "fast", "more", "look", "run")
# module of the ground floor -> the modules of minragen that it may import, anywhere in the file
GROUND_FLOOR = {
    "starpo": set(), "envs": {"options"}, "cache": set(), "models": {"starpo", "cache"},
    "trajectory": {"envs"}, "chat": {"envs", "trajectory", "formats", "template"},
    "rollout": {"trajectory", "cache", "noise"},
    "train": {"starpo", "chat", "models", "rollout", "trajectory", "config", "metrics"}}
BESIDE = {"__init__": set(), "options": set(), "noise": set(), "template": set(),
          "formats": {"options"}, "metrics": {"trajectory", "envs"}, "checks": {"starpo"},
          "config": {"envs", "formats", "starpo", "checks", "options"},
          "nano": {"envs", "chat", "models"}}
# The one import of a wing that each may have, inside of main().
IN_MAIN = {"train": {"run.start"}, "nano": {"run.bundled"}}
# wing -> the wings that it may import, beside the ground floor and what is beside it; environments
# import of those only envs and options
BELOW = {"environments": {"environments"}, "more": {"more"}, "fast": {"fast"},
         "look": {"look", "more", "fast", "environments"}, "run": set(WINGS)}
# Both read only what knows nothing of them: the folders of runs, the time limit of a request.
STORED = {"look/report": "run.runs", "more/api": "environments.limits"}
SIZES = {"the ground floor": (GROUND_FLOOR, 2835), "config.py": (["config"], 350),
         "nano.py": (["nano"], 200)}  # lines at most


def imported(source, texts=False):
    """The modules of minragen that a source imports, lazily or not, without the package's name;
    with `texts` also those that a text names, such as "minragen.run.start:main"."""
    found, tree = set(), ast.parse(source)
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            packages = {"minragen", *(f"minragen.{wing}" for wing in WINGS)}
            found |= ({f"{node.module}.{alias.name}" for alias in node.names}
                      if node.module in packages else {node.module or "."})
        elif texts and isinstance(node, ast.Constant) and id(node) not in told:
            found |= {match for match in re.findall(r"\bminragen\.(?:\w+\.)?\w+", str(node.value))
                      if match.split(".")[1] in WINGS}
    return {name.removeprefix("minragen.") for name in found if re.match(r"minragen|\.", name)}


def forbidden_imports(root=ROOT):
    faults = []
    for path in sorted((root / "minragen").rglob("*.py")):
        module = path.relative_to(root / "minragen").with_suffix("").as_posix()
        wing, source = module.partition("/")[0], path.read_text()
        if re.search(r"^\s*(from|import) (lab|tests)\b", source, re.MULTILINE):
            faults.append(f"minragen/{module}.py imports what is not installed with it")
        for name in sorted(imported(source, texts=wing not in BELOW)):
            if wing in BELOW:
                free = name.partition(".")[0] in {*GROUND_FLOOR, *BESIDE, *BELOW[wing]}
                free = free or name == STORED.get(module)
                leaf = wing == "environments" and "." not in name
                allowed = name in ("envs", "options") if leaf else free
            elif module in ("eval", "__main__"):
                allowed = True
            else:
                allowed = (name in (GROUND_FLOOR | BESIDE)[module]
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
    """Parts of the package that have grown beyond what a reader was promised."""
    faults = []
    for part, (modules, most) in SIZES.items():
        lines = sum(len((root / "minragen" / f"{module}.py").read_text().splitlines())
                    for module in modules)
        if lines > most:
            faults.append(f"{part}: {lines} lines, expected at most {most}")
    return faults


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
    # Of config.py only what builds the environments: its checks read every option.
    code = "\n".join(path.read_text().rpartition("The environments of a Config")[2]
                     for path in (root / "minragen").rglob("*.py")
                     if "environments" not in path.parts)
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
