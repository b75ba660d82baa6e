"""The configs of examples/tartan build what they say, at a tiny size."""

import lzma
import os
import subprocess
import sys
from pathlib import Path

import image_data
import numpy as np
import pytest
from PIL import Image

from metaseq_lm.core.loading import load_config
from metaseq_lm.data.images import load_images
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.training.parts import evaluate_split
from metaseq_lm.training.price import estimate_price

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "tartan"
CONFIGS = sorted(p.stem for p in (EXAMPLE / "config").glob("*.yaml"))
IMAGES = [name for name in CONFIGS if name.startswith("images_")]
TINY = """
    model=transformer model.encoder_layers=1 model.encoder_embed_dim=16
    model.encoder_ffn_embed_dim=32 model.encoder_attention_heads=2 model.max_positions=12
    task.tokens_per_sample=12 engine.threads=1 engine.tensorboard=false
""".split()
DOMAIN = ["task.auxiliary=[tapt,train]", "task.lines_per_example=6"]


@pytest.mark.parametrize("name", sorted({*CONFIGS} - {*IMAGES}))
def test_each_config_makes_an_update(name: str, topics: Path, tmp_path: Path) -> None:
    more = ["task.labelled=topic"]
    more += DOMAIN if name in ("dapt", "tapt", "mt", "meta", "meta_same_head") else []
    places = [f"data={topics}", f"save_dir={tmp_path}"]
    config = load_config([*TINY, *more, *places], str(EXAMPLE / "config"), name)
    estimate = estimate_price(config)
    assert len(estimate.first_updates) == 1
    run = estimate.parts
    evaluate_split(run, "valid")
    if name in ("mt", "meta", "meta_same_head"):
        assert len(run.task.members) == 3


@pytest.mark.parametrize("name", IMAGES)
def test_each_config_of_images_makes_an_update(name: str, tmp_path: Path) -> None:
    data = image_data.write(tmp_path / "images")
    places = [f"data={data}", f"save_dir={tmp_path / 'run'}", "task.target=[a,b]"]
    sizes = ["model.depth=10", "model.width=1", "engine.threads=1"]
    config = load_config([*places, *sizes], str(EXAMPLE / "config"), name)
    estimate = estimate_price(config)
    assert len(estimate.first_updates) == 1
    evaluate_split(estimate.parts, "valid")


def test_image_folders_are_read(tmp_path: Path) -> None:
    """A folder of class folders becomes the images in it; anything else is one message."""
    written = image_data.make(2, 1)
    for split in ("train", "test"):
        for i, (image, label) in enumerate(zip(written.images, written.labels)):
            place = tmp_path / split / written.names[label]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"{i}.png")
    command = [sys.executable, str(EXAMPLE / "images.py"), str(tmp_path / "data"), "--size", "8"]
    paths = [f"--{split}={tmp_path / split}" for split in ("train", "test")]
    done = subprocess.run([*command, *paths], capture_output=True, text=True)
    assert done.returncode == 0 and "test: a 2, b 2, c 2, d 2" in done.stdout, done.stderr
    found = load_images(tmp_path / "data", "train")
    order = np.argsort(written.labels, kind="stable")
    assert (found.images == written.images[order]).all() and found.names == written.names
    (tmp_path / "train" / "a" / "0.png").write_bytes(b"no image")
    done = subprocess.run([*command, *paths], capture_output=True, text=True)
    assert done.returncode == 1 and "0.png: not" in done.stderr
    assert "Traceback" not in done.stderr


def test_images_of_npz_files_are_read(tmp_path: Path) -> None:
    """Numbers are the classes that --names has in this order; without names they mean nothing."""
    written = image_data.make(2, 1)
    for split in ("train", "test"):
        np.savez(tmp_path / f"{split}.npz", x=written.images, y=written.labels)
    command = [sys.executable, str(EXAMPLE / "images.py"), str(tmp_path / "data")]
    command += [f"--{split}={tmp_path / split}.npz" for split in ("train", "test")]
    done = subprocess.run([*command, "--names", "k,l,m,n"], capture_output=True, text=True)
    assert done.returncode == 0 and "test: k 2, l 2, m 2, n 2" in done.stdout, done.stderr
    found = load_images(tmp_path / "data", "test")
    assert (found.images == written.images).all() and (found.labels == written.labels).all()
    assert list(found.names) == ["k", "l", "m", "n"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "--names" in done.stderr


def test_the_data_of_the_example(tmp_path: Path) -> None:
    """prepare.sh: two domains, their pieces, one end task each; packed files too."""
    texts = {name: [f"{name} " * 250 + f"number {i}" for i in range(120)] for name in ("cs", "bio")}
    (tmp_path / "cs.txt").write_text("\n".join(texts["cs"]) + "\n")
    (tmp_path / "bio.txt.xz").write_bytes(lzma.compress("\n".join(texts["bio"]).encode()))
    pairs = []
    for name in ("sciie", "chemprot"):
        (tmp_path / name).mkdir()
        rows = "".join(f'{{"text": "{name} a", "label": "{i % 2}"}}\n' for i in range(4))
        for split in ("train", "dev", "test"):
            (tmp_path / name / f"{split}.jsonl").write_text(rows)
        pairs.append(f"{name}={tmp_path / name}")
    (tmp_path / "python").symlink_to(sys.executable)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    root = EXAMPLE.parents[1]
    script, data = str(EXAMPLE / "prepare.sh"), tmp_path / "data"
    command = [
        "bash",
        script,
        str(data),
        str(tmp_path / "cs.txt"),
        str(tmp_path / "bio.txt.xz"),
        *pairs,
    ]
    paths = os.pathsep.join(p for p in (str(root), *sys.path) if p)
    environment = dict(os.environ, PATH=path, PYTHONPATH=paths, VOCAB="200")
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sizes = {
        n: IndexedDataset(data / n) for n in ("train", "valid", "domain_sciie", "domain_chemprot")
    }
    assert [len(s) for s in sizes.values()] == [238, 2, 360, 360]
    assert sizes["domain_sciie"].sizes.max() == 100
    assert len(LabelledSet(data / "chemprot", "valid")) == 4
