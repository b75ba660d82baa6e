"""An installation without extras: the wheel of this checkout's sdist and its requirements.

The packages are those in the metadata, linked from this interpreter; packages that only an extra or
a test needs cannot be imported. Commands run outside of the checkout: the first one of each name
like a user's, the others in forks of a server that has imported torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path
from typing import NamedTuple

import pytest
import sharing
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
BUILT = ("metaseq_lm", "docs", "examples", "scripts", "user_dir", "setup.py", "setup.cfg")
BUILT += ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
BUILT += ("CITATION.cff", "constraints.txt", "tests")
# Variables of this session that must not lead to its packages.
OWN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class Ended(NamedTuple):
    """The exit code of a command, and its output on both streams."""

    code: int
    text: str


def environment() -> dict[str, str]:
    """Return the environment of a program outside of this checkout."""
    kept = {name: value for name, value in os.environ.items() if name not in OWN}
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1", "HF_HUB_OFFLINE": "1"}
    return kept | quiet


def call(*words: str | Path, cwd: Path, path: Path | None = None) -> str:
    """Run a program without this checkout on its path; return its output."""
    variables = environment()
    if path is not None:
        variables["PATH"] = f"{path}{os.pathsep}{variables['PATH']}"
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, env=variables, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_sources(place: Path) -> Path:
    """Copy the sources to build, so that nothing is written next to them."""
    hidden = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info", "build")
    for name in BUILT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / name, ignore=hidden)
        else:
            shutil.copy2(ROOT / name, place / name)
    return place


def build(kind: str, source: Path, out: Path) -> Path:
    """Build a wheel or an sdist of a copy of the sources with this interpreter's setuptools."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    return out / call(sys.executable, "-c", code, cwd=source).splitlines()[-1]


def required(installed: Distribution) -> list[Distribution]:
    """Return the distributions that one requires without extras, directly or indirectly."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(line, "") for line in installed.requires or []]
    while waiting:
        line, extra = waiting.pop()
        needed = Requirement(line)
        if needed.marker and not needed.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *needed.extras):
            if (needed.name, wanted) in seen:
                continue
            seen.add((needed.name, wanted))
            found[needed.name] = distribution(needed.name)
            waiting += [(line, wanted) for line in found[needed.name].requires or []]
    return list(found.values())


def link(packages: Sequence[Distribution], site: Path) -> None:
    """Link the files of distributions, and their bytecode, into a folder."""
    for package in packages:
        for file in package.files or []:
            sources = [Path(str(package.locate_file(file)))]
            if ".." in file.parts or not sources[0].is_file():
                continue  # skip programs, which are not needed
            if file.suffix == ".py":
                sources.append(Path(importlib.util.cache_from_source(str(sources[0]))))
            targets = [site / file, site / file.parent / "__pycache__" / sources[-1].name]
            for source, target in zip(sources, targets):
                if source.is_file() and not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.symlink_to(source)


def install(place: Path) -> None:
    """Make an environment in a folder, and install the wheel of the sdist into it."""
    sdist = build("sdist", copy_sources(place / "source"), place)
    call("tar", "-xzf", sdist, cwd=place)
    wheel = build("wheel", place / sdist.name.removesuffix(".tar.gz"), place)
    venv.create(place / "environment")
    python = place / "environment" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    call(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=place)
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(call(python, "-c", show, cwd=place).strip())
    (installed,) = distributions(path=[str(site)])
    link(required(installed), site)
    call(*pip, "check", cwd=place)


class Bare:
    """The environment of `install` in a folder, and a server in it that runs commands."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.programs = place / "environment" / "bin"
        self.python = self.programs / "python"
        self.copy = place / "copy"  # copy made by `metaseq-lm examples`
        self._server = subprocess.Popen(
            [self.python, "-I", ROOT / "tests" / "support" / "bare_server.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=place,
            env=environment(),
        )

    def run(self, words: Sequence[str], folder: Path) -> Ended:
        """Run `metaseq-lm ...` or `python FILE ...` in a folder."""
        if words[0] == "metaseq-lm" and self._is_first(words[1]):
            return self._run_anew(words, folder)
        assert self._server.stdin and self._server.stdout
        output = self.place / f"output.{self._server.pid}"
        asked = {"words": list(words), "folder": str(folder), "output": str(output)}
        self._server.stdin.write(json.dumps(asked) + "\n")
        self._server.stdin.flush()
        code = int(self._server.stdout.readline())
        return Ended(code, output.read_text(encoding="utf-8", errors="replace"))

    def _is_first(self, command: str) -> bool:
        """Return whether no process of the test session has run this command."""
        with contextlib.suppress(FileExistsError):
            (self.place / f"started-{command}").touch(exist_ok=False)
            return True
        return False

    def _run_anew(self, words: Sequence[str], folder: Path) -> Ended:
        done = subprocess.run(
            [self.programs / words[0], *words[1:]],
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        return Ended(done.returncode, done.stdout)

    def close(self) -> None:
        """End the server."""
        self._server.communicate()


def bare_place(factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the environment and a copy of the examples, made once per session."""

    def make(marker: Path) -> None:
        # An environment cannot be moved to `marker`, because its programs contain its path.
        place = marker.parent / "bare-place"
        place.mkdir()
        install(place)
        call(place / "environment" / "bin" / "metaseq-lm", "examples", place / "copy", cwd=place)

    return sharing.once(factory, "bare", make).parent / "bare-place"
