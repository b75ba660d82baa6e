"""examples/cvt/vectors.py: word vectors of a text, in the format that `preprocess` reads."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from metaseq_lm.data.records.text_files import TextFile
from metaseq_lm.data.words.vocabulary import read_vectors
from metaseq_lm.models.words.word_embedding import SPREAD

ROOT = Path(__file__).resolve().parents[4]


def run(text: Path, out: Path, hash_seed: int) -> subprocess.CompletedProcess[str]:
    environment = dict(
        os.environ,
        PYTHONHASHSEED=str(hash_seed),
        PYTHONPATH=os.pathsep.join(p for p in (str(ROOT), *sys.path) if p),
    )
    script = str(ROOT / "examples" / "cvt" / "vectors.py")
    command = [sys.executable, script, str(text), str(out), "--width", "8"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_same_text_gives_the_same_vectors(tmp_path: Path) -> None:
    """Whatever Python's hashes; words are normalised, rare ones left out, the spread is GloVe's."""
    text = tmp_path / "text.txt"
    text.write_text("The dog saw 12 cats. The cat saw 13 dogs.\n\n" * 40 + "A rare word.\n")
    for seed in (1, 2):
        done = run(text, tmp_path / f"{seed}.txt", seed)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "1.txt").read_bytes() == (tmp_path / "2.txt").read_bytes()
    found = read_vectors(TextFile(tmp_path / "1.txt"), None)
    assert set(found) == {"the", "dog", "saw", "00", "cats", "cat", "dogs", "."}
    table = np.stack(list(found.values()))
    assert table.shape[1] == 8
    np.testing.assert_allclose(np.sqrt((table**2).mean()), SPREAD, rtol=1e-3)


def test_a_text_that_is_not_there(tmp_path: Path) -> None:
    done = run(tmp_path / "none.txt", tmp_path / "out.txt", 1)
    assert done.returncode == 2 and "none.txt" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out.txt").exists()
