"""The rules of the layout, read off the source: who may import whom, and how large
things may be.
"""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from metaseq_lm import plugins
from metaseq_lm.core.registry import ALL

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "metaseq_lm"
WINGS = plugins._builtin_methods()
SOURCES = sorted(PACKAGE.rglob("*.py")) + sorted((ROOT / "user_dir").glob("*.py"))
TOP = {
    "setup.cfg README.md metaseq_lm user_dir examples scripts tests pyproject.toml LICENSE",
    "CHANGELOG.md constraints.txt setup.py MANIFEST.in CITATION.cff",
    "CONTRIBUTING.md docs mkdocs.yml",
}
ONCE = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"}
FORBIDDEN = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "pandas.read_pickle"),
    *("subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell"),
    *("hydra.utils.instantiate", "hydra.utils.call", "torch.package.PackageImporter"),
}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted names a file imports, relative ones made absolute."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            yield ".".join([*base, *([node.module] if node.module else [])])


def wing_of(module: str) -> str | None:
    """Return the wing a dotted name lies in, or None."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["metaseq_lm", "methods"] and len(parts) > 2 else None


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by their names alone."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_the_core_imports_no_wing_and_no_wing_another() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        own = wing_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for name in imports(path):
            if wing_of(name) not in (None, own):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


# The modules of the extras.
EXTRAS = {"argcomplete", "mlflow", "optuna", "pyarrow", "trackio", "transformers", "wandb"}
EXTRAS |= {"gensim", "huggingface_hub", "zstandard"}


def test_extras_are_imported_where_they_are_needed() -> None:
    """Inside functions: what needs no extra runs in an installation without extras."""
    wrong = []
    for path in SOURCES:
        names: list[str] = []
        for node in parsed(path).body:
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        extras = [n for n in names if n in EXTRAS or n.split(".")[0] in EXTRAS]
        wrong += [f"{path.relative_to(ROOT)}: {n}" for n in extras]
    assert not wrong


def run(code: str) -> str:
    """Run a program in a fresh interpreter and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_no_wing() -> None:
    shown = run(
        "import metaseq_lm, metaseq_lm.training.trainer, metaseq_lm.training.run, sys; "
        "print(*sys.modules)"
    )
    assert not [name for name in shown.split() if wing_of(name)]


@pytest.mark.parametrize("wing", WINGS)
def test_each_wing_imports_alone(wing: str) -> None:
    shown = run(f"import metaseq_lm.methods.{wing}, sys; print(*sys.modules)")
    assert {wing_of(name) for name in shown.split()} <= {None, wing}


@pytest.mark.parametrize("wing", WINGS)
def test_wings_have_the_same_files(wing: str) -> None:
    files = {p.name for p in (PACKAGE / "methods" / wing).iterdir()}
    assert {
        "__init__.py",
        "options.py",
        "task.py",
        "criterion.py",
        "model.py",
        "README.md",
    } <= files


def test_the_trainer_names_no_method() -> None:
    words = (PACKAGE / "training/trainer.py").read_text() + (
        PACKAGE / "engine/engine.py"
    ).read_text()
    assert not [wing for wing in WINGS if wing in words]


# transformers' ELECTRA: what its folders call it, and the criterion that goes on training it.
EXCHANGED = {"interop/configs.py": {"electra", "electra_rtd"}, "interop/names.py": {"electra"}}


def literals(path: Path) -> set[str]:
    """Return the string literals of a file."""
    nodes = ast.walk(parsed(path))
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def test_the_core_knows_no_wing_by_a_string() -> None:
    plugins.load_all(None)
    names = {
        name
        for kind in ("task", "criterion")
        for name, entry in ALL[kind].entries.items()
        if wing_of(entry.origin)
    }
    named = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if not file.startswith("methods/"):
            named[file] = literals(path) & {*names, *WINGS}
    assert {file: names for file, names in named.items() if names} == EXCHANGED


def test_top_level_is_as_designed() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    top = {name.split("/")[0] for name in listed.stdout.split()}
    assert {n for n in top if not n.startswith(".")} <= set(" ".join(TOP).split())


# From the bottom to the top. `plugins` is the composition root: it imports what names are
# registered by, some of it by strings, so only commands may import it.
ROOMS = (
    *"core config distributed runs forward data optim engine models criterions".split(),
    *("evaluation", "tasks", "training", "interop", "sweeps", "reporting", "league", "referee"),
    "methods",
    *("plugins", "cli"),
)


def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        names[name.removesuffix(".__init__")] = path
    return names


def imported_modules() -> dict[str, set[str]]:
    """Return which modules of the package each module imports, inside functions too."""
    known, edges = modules(), {}
    for name, path in known.items():
        edges[name] = set()
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Import):
                edges[name] |= {a.name for a in node.names if a.name in known}
            elif isinstance(node, ast.ImportFrom) and node.module:
                full = {f"{node.module}.{a.name}" for a in node.names}
                edges[name] |= {n if n in known else node.module for n in full} & known.keys()
        edges[name].discard(name)
    return edges


def test_imports_run_down_the_list_of_rooms() -> None:
    wrong = []
    for name, imported in imported_modules().items():
        room = name.split(".")[1] if "." in name else ""
        for other in imported:
            below = other.split(".")[1] if "." in other else ""
            if room in ROOMS and below in ROOMS and ROOMS.index(below) > ROOMS.index(room):
                wrong.append(f"{name} imports {other}")
    assert not wrong
    parts = {name.split(".")[1] for name in modules() if "." in name}
    assert parts - {"__main__"} == set(ROOMS)


def test_only_the_composition_root_imports_by_name() -> None:
    """An import by a string would hide from the rule above."""
    importing = set()
    for name, path in modules().items():
        for _, function in called(parsed(path)):
            if function == "importlib.import_module":
                importing.add(name)
    # `cli` imports its own modules, `registry` what the package declares, when it is first used.
    assert importing == {"metaseq_lm.plugins", "metaseq_lm.cli", "metaseq_lm.core.registry"}


def test_imports_have_no_circle() -> None:
    edges, done = imported_modules(), set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in sorted(edges[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def test_public_functions_have_a_docstring() -> None:
    """All that is public but overrides and overloads, documented at their declaration."""
    wrong = []
    for path in SOURCES:
        tree = parsed(path)
        assert ast.get_docstring(tree) or path.name in ("__init__.py", "__main__.py"), path
        for node in tree.body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                continue
            overload = any(getattr(d, "id", "") == "overload" for d in node.decorator_list)
            public = node.name[0] != "_" and not overload
            if public and not ast.get_docstring(node):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not wrong


def called(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """Yield every call with the dotted name of what is called, whatever it was imported as."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {a.asname or a.name: a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, dot, rest = ast.unparse(node.func).partition(".")
            yield node, known.get(first, first) + dot + rest


def untrusted(source: str) -> list[str]:
    """Return the calls in a program by which a file or a text could become code."""
    wrong = []
    for node, name in called(ast.parse(source)):
        keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
        bad = name in FORBIDDEN or name.split(".")[0] in ONCE
        bad |= keywords.get("shell", "False") != "False" or "trust_remote_code" in keywords
        bad |= keywords.get("allow_pickle", "False") != "False"
        bad |= name == "torch.load" and keywords.get("weights_only") != "True"
        bad |= name == "numpy.load" and len(node.args) > 2
        safe = name in ("yaml.parse", "yaml.safe_load") or name.startswith("yaml.SafeLoader")
        bad |= name.startswith("yaml.") and not safe
        if bad:
            wrong.append(f"{node.lineno} {name}")
    # Readers of YAML that make objects of classes; OmegaConf's, and ours of configs, are safe ones.
    return wrong + re.findall(r"\byaml\W+(C?(?:Full|Unsafe)?Loader)\b", source)


def test_nothing_untrusted_is_executed() -> None:
    """No pickle, eval, exec or shell; torch.load only with weights_only."""
    wrong = []
    programs = [p for f in ("examples", "scripts") for p in sorted((ROOT / f).rglob("*.py"))]
    for path in SOURCES + programs:
        wrong += [f"{path}: imports {n}" for n in imports(path) if n.split(".")[0] in ONCE]
        found = untrusted(path.read_text(encoding="utf-8"))
        wrong += [f"{path.relative_to(ROOT)}:{line}" for line in found]
    assert not wrong


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle; pickle.load(f)", "import pickle as p; p.loads(b)", "eval('1')"),
        *("from torch import load; load(f)", "import torch; torch.load(f, weights_only=x)"),
        *(
            "import numpy as np; np.load(f, None, True)",
            "import numpy as np; np.load(f, allow_pickle=x)",
        ),
        *(
            "import yaml; yaml.load(f, yaml.SafeLoader)",
            "from yaml import unsafe_load; unsafe_load(f)",
            "import yaml; class_ = type('R', (yaml.CLoader,), {})",
        ),
        *("exec('x')", "import os; os.system('x')", "from os import popen; popen('x')"),
        *(
            "import subprocess; subprocess.run('x', shell=True)",
            "from subprocess import getoutput as g; g('x')",
        ),
        *(
            "import marshal; marshal.loads(b)",
            "import shelve; shelve.open('x')",
            "import joblib; joblib.load(f)",
        ),
        *("from hydra.utils import instantiate; instantiate(c)",),
        *("import pandas as pd; pd.read_pickle(f)", "compile('x', 'y', 'exec')", "__import__('x')"),
    ],
)
def test_the_rule_above_sees(source: str) -> None:
    assert untrusted(source)
