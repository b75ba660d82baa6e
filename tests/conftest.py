"""Fixtures shared by all tests: one thread, the registered methods, a small Two Moons folder."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from metaseq_lm import plugins
from metaseq_lm.cli import main

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models are fastest on one thread, and tests must not fight for cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def registered() -> None:
    """Every built-in name is registered, and the example plug-in with them."""
    plugins.load_all(str(ROOT / "user_dir"))


@pytest.fixture(scope="session")
def moons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A binarised Two Moons folder: 600 + 100 lines and the labelled set which_moon_20."""
    text = tmp_path_factory.mktemp("text")
    command = [sys.executable, str(ROOT / "examples/meta_pseudo_label/two_moons.py"), str(text)]
    subprocess.run(command, check=True)
    for split, count in (("train", 600), ("valid", 100)):
        kept = (text / f"{split}.txt").read_text().splitlines()[:count]
        (text / f"{split}.txt").write_text("\n".join(kept) + "\n")
    data = tmp_path_factory.mktemp("data") / "moons"
    corpus = ["--trainpref", f"{text}/train.txt", "--validpref", f"{text}/valid.txt"]
    tokenizer = ["--tokenizer-corpus", f"{text}/tokenizer.txt", "--vocab-size", "512"]
    assert main(["preprocess", *corpus, *tokenizer, "--destdir", str(data)]) == 0
    name = "which_moon_20"
    files = [f"--{s}pref={text}/{name}/{s}.tsv" for s in ("train", "valid", "test")]
    assert main(["preprocess", "--labelled", name, *files, "--destdir", str(data)]) == 0
    return data
