"""Examples that an installed package has with it, and the wheel and sdist that carry them."""

import os
import re
import zipfile
from pathlib import Path

import pytest
from bare import ROOT, Bare, call
from outcomes import expect_facts

from metaseq_lm import __version__
from metaseq_lm.cli import main

PACKAGE = "metaseq_lm"
# Not huggingface_hub, which tokenizers requires.
EXTRAS = "argcomplete gensim mlflow optuna pyarrow trackio transformers wandb zstandard".split()


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
    expect_facts(capsys.readouterr().err, str(target), "another folder")


@pytest.fixture(scope="module")
def checkout(bare: Bare) -> Path:
    return bare.place / "source"


@pytest.fixture(scope="module")
def wheel(bare: Bare) -> Path:
    (wheel,) = bare.place.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_wheel_holds_package_configs_and_examples(wheel: Path, checkout: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert f"-{__version__}-" in wheel.name
    assert {"metaseq_lm/py.typed", "metaseq_lm/config/base.yaml"} <= names
    shipped = "metaseq_lm/shipped/"
    for folder, place in [(n, shipped) for n in ("docs", "examples", "user_dir")] + [(PACKAGE, "")]:
        wanted = {p for p in (checkout / folder).rglob("*") if p.is_file()}
        assert {f"{place}{p.relative_to(checkout)}" for p in wanted} <= names
    assert f"{shipped}scripts/quickstart" in names
    left_out = ("tests/", f"{shipped}scripts/test", f"{shipped}scripts/release")
    assert not any(name.startswith(left_out) for name in names)


@pytest.mark.slow
def test_wheel_trains_the_plug_in_in_an_empty_folder(bare: Bare, tmp_path: Path) -> None:
    """From the wheel alone: copy the examples, train user_dir's objective."""
    program = bare.programs / "metaseq-lm"
    assert call(program, "--version", cwd=tmp_path).strip() == f"metaseq-lm {__version__}"
    where = call(bare.python, "-c", "import metaseq_lm; print(metaseq_lm.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(bare.place)
    call(program, "examples", ".", cwd=tmp_path)
    assert os.access(tmp_path / "scripts" / "quickstart", os.X_OK)
    (tmp_path / "text").write_text("the cat sat on the mat\na dog ran to the cat\n" * 40)
    words = ["--trainpref", "text", "--validpref", "text", "--tokenizer", "word"]
    call(program, "preprocess", *words, "--destdir", "data", cwd=tmp_path)
    plug_in = ["--user-dir", "user_dir", "--task", "span_masking", "--criterion", "span_boundary"]
    sizes = ["model.encoder_layers=1", "model.encoder_embed_dim=8", "model.encoder_ffn_embed_dim=8"]
    sizes += ["model.encoder_attention_heads=2", "task.tokens_per_sample=16", "task.batch_size=4"]
    train = ["train", "data", *plug_in, *sizes, "--max-update=2", "--save-dir=run"]
    call(program, *train, cwd=tmp_path)
    assert "span_masking/span_boundary" in call(program, "report", "run", cwd=tmp_path)


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_the_installation_has_no_extra(extra: str, bare: Bare, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(f"import {extra}")
    assert "ModuleNotFoundError" in bare.run(["python", "program.py"], tmp_path).text
