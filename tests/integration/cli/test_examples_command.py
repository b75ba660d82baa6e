"""Examples that an installed package has with it, and the wheel and sdist that carry them."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from metaseq_lm import __version__
from metaseq_lm.cli import main

ROOT = Path(__file__).resolve().parents[3]
BUILT = ("metaseq_lm", "docs", "examples", "scripts", "user_dir", "setup.py", "setup.cfg")
BUILT += ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
BUILT += ("CITATION.cff", "constraints.txt", "tests")


def test_examples_lists_each_example_with_its_title(capsys: pytest.CaptureFixture) -> None:
    assert main(["examples"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = sorted(p.name for p in (ROOT / "examples").iterdir() if (p / "README.md").exists())
    assert [line.split()[0] for line in lines if len(line.split()) > 1] == names


def test_examples_copies_a_checkout_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    target = tmp_path / "bench"
    assert main(["examples", str(target)]) == 0
    for name in ("examples/bam/run.sh", "scripts/quickstart", "user_dir/criterion.py"):
        assert (target / name).read_bytes() == (ROOT / name).read_bytes()
    assert os.access(target / "scripts" / "quickstart", os.X_OK)
    for file in (*target.glob("examples/**/*.md"), *target.glob("user_dir/**/*.md")):
        for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", file.read_text()):
            assert (file.parent / link).exists(), f"{file}: {link}"
    assert main(["examples", str(target)]) == 2
    assert "exists already; choose another folder" in capsys.readouterr().err


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a program without this checkout on its path; return what it prints."""
    values = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=values | environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    """Build a wheel or an sdist of a copy of the sources with this interpreter's setuptools."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    name = run(sys.executable, "-c", code, cwd=source).splitlines()[-1]
    return out / name


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built, so that nothing is written beside the sources."""
    place = tmp_path_factory.mktemp("checkout")
    hidden = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info", "build")
    for name in BUILT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / name, ignore=hidden)
        else:
            shutil.copy2(ROOT / name, place / name)
    return place


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", checkout, tmp_path_factory.mktemp("wheel"))


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {n for n in archive.namelist() if ".dist-info/" not in n}


@pytest.mark.slow
def test_wheel_holds_package_configs_and_examples(wheel: Path, checkout: Path) -> None:
    names = names_in(wheel)
    assert f"-{__version__}-" in wheel.name
    assert {"metaseq_lm/py.typed", "metaseq_lm/config/base.yaml"} <= names
    for folder in ("docs", "examples", "user_dir"):
        wanted = {p for p in (checkout / folder).rglob("*") if p.is_file()}
        assert {f"metaseq_lm/shipped/{p.relative_to(checkout)}" for p in wanted} <= names
    assert "metaseq_lm/shipped/scripts/quickstart" in names
    assert not any(n.startswith(("tests/", "metaseq_lm/shipped/scripts/test")) for n in names)


@pytest.mark.slow
def test_sdist_builds_the_same_wheel(wheel: Path, checkout: Path, tmp_path: Path) -> None:
    sdist = build("sdist", checkout, tmp_path)
    subprocess.run(["tar", "-xzf", sdist, "-C", tmp_path], check=True)
    source = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert names_in(build("wheel", source, tmp_path)) == names_in(wheel)


@pytest.mark.slow
def test_wheel_trains_the_plug_in_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """From the wheel alone, in an empty folder: copy the examples, train user_dir's objective."""
    place = tmp_path / "environment"
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    own = Path(
        run(
            python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place
        ).strip()
    )
    # torch and the like are not fetched again: they come from this interpreter, after its own.
    (own / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    program = place / "bin" / "metaseq-lm"
    assert run(program, "--version", cwd=empty).strip() == f"metaseq-lm {__version__}"
    where = run(python, "-c", "import metaseq_lm; print(metaseq_lm.__file__)", cwd=empty)
    assert Path(where.strip()).is_relative_to(own)
    run(program, "examples", ".", cwd=empty)
    assert os.access(empty / "scripts" / "quickstart", os.X_OK)
    (empty / "text").write_text("the cat sat on the mat\na dog ran to the cat\n" * 40)
    words = ["--trainpref", "text", "--validpref", "text", "--tokenizer", "word"]
    run(program, "preprocess", *words, "--destdir", "data", cwd=empty)
    plug_in = ["--user-dir", "user_dir", "--task", "span_masking", "--criterion", "span_boundary"]
    sizes = ["model.encoder_layers=1", "model.encoder_embed_dim=8", "model.encoder_ffn_embed_dim=8"]
    sizes += ["model.encoder_attention_heads=2", "task.tokens_per_sample=16", "task.batch_size=4"]
    run(program, "train", "data", *plug_in, *sizes, "--max-update=2", "--save-dir=run", cwd=empty)
    assert "span_masking/span_boundary" in run(program, "report", "run", cwd=empty)
