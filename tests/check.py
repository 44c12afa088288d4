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

# module -> the modules of minragen that it may import, anywhere in the file
ALGORITHM = {"envs", "starpo", "chat", "attention", "models", "rollout"}
ALLOWED = {
    "__init__": set(), "envs": set(), "faults": {"envs"}, "starpo": set(), "llama": set(),
    "distributed": {"faults", "train"},
    "lora": set(), "loggers": set(), "vision": {"envs"}, "chat": {"envs"}, "attention": {"llama"},
    "models": {"starpo", "attention", "lora", "vision"},
    "nano": {"envs", "chat", "models", "bundled"},  # the last one inside main() only
    "rollout": {"envs", "faults", "chat", "attention", "models"},
    "diagnostics": {"starpo", "chat", "attention", "models", "train"},
    "bundled": {"envs", "chat", "attention", "models", "rollout", "vision",
                "distributed", "environments.data"},
    "config": {"envs", "chat", "starpo", "loggers"},
    "runs": {"envs", "faults", "config", "diagnostics", "distributed", "loggers", "lora", "train",
             "vision"},
    "memory": {"models", "diagnostics", "config"},
    # The algorithm knows no wing; `main` calls the one place that puts a run together.
    "train": ALGORITHM | {"config", "run.start"},
    "run/__init__": set(),
    "run/start": ALGORITHM | {"bundled", "config", "distributed", "lora", "memory", "report",
                              "runs", "train", "vision"},
    "report": {"config", "diagnostics", "eval", "faults", "runs"},
    "eval": ALGORITHM | {"bundled", "config", "runs", "run.start", "train", "api", "vision",
                         "distributed", "faults", "environments.board"},
    "api": {"envs", "chat", "rollout", "vision"}, "reproduce": {"faults", "runs", "run.start"}}


def imported(source):
    """The modules of minragen that a source imports, lazily or not, without the package's name."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            packages = node.module in ("minragen", "minragen.environments", "minragen.run")
            found |= ({f"{node.module}.{alias.name}" for alias in node.names} if packages else
                      {node.module or "."})
    return {name.removeprefix("minragen.") for name in found if re.match(r"minragen|\.", name)}


def forbidden_imports(root=ROOT):
    faults = []
    for path in sorted((root / "minragen").rglob("*.py")):
        module = path.relative_to(root / "minragen").with_suffix("").as_posix()
        for name in sorted(imported(path.read_text())):
            allowed = (name in ("envs", "faults", "data") or name.startswith("environments.")
                       if module.startswith("environments/") else name in ALLOWED[module])
            if not allowed:
                faults.append(f"minragen/{module}.py imports minragen.{name}")
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
                     for part in ("*.py", "run/*.py") for path in (root / "minragen").glob(part))
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
    found = [*forbidden_imports(), *dead_links(), *unread_options()]
    print("\n".join(found) or "imports, links and options are in order")
    sys.exit(bool(found))
