"""examples/cvt/prepare.sh: data folders from folders of files as the sets are distributed."""

import lzma
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import word_data

from metaseq_lm.data.words.sets import WordSet
from metaseq_lm.data.words.vocabulary import WordVocabulary

# A quotation, and an inch mark, which is none.
QUOTED = """1	"	"	PUNCT	``	_	2	punct	_	_
2	dogs	dog	NOUN	NNS	_	0	root	_	_
3	"	"	PUNCT	''	_	2	punct	_	_
4	"	"	NOUN	NN	_	2	dep	_	_

"""
ROOT = Path(__file__).resolve().parents[4]


def packed(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(path.name + ".xz").write_bytes(lzma.compress(text.encode()))


def sources(folder: Path, files: Path) -> None:
    """Write the folders that the script names, small; some files packed."""
    chapters = [f"<<<NOVEL {n}\n\nThe dog number {n} saw a cat. It ran home.\n" for n in range(5)]
    packed(folder / "english-novels" / "novels.txt", "\n".join(chapters))
    for split in ("train", "valid", "test"):
        packed(
            folder / "wikitext-2" / f"wiki.{split}.tokens", " = Dogs = \n\n A dog is a <unk> . \n"
        )
        name = f"en_ewt-ud-{split.replace('valid', 'dev')}.conllu"
        packed(folder / "ud-english-ewt" / name, QUOTED + (files / f"{split}.conllu").read_text())
    chunks = {s: (files / f"{s}.conll").read_text() for s in ("train", "valid", "test")}
    packed(folder / "conll2000-chunking" / "train.txt", chunks["train"])
    (folder / "conll2000-chunking" / "test.txt").write_text(chunks["test"])
    text = "A wild-type dog has a wild-type gene. The wild-type gene is an old gene."
    documents = f"genia:1\tGenes of genes in genes.\nmed:1\t{text}\n"
    packed(folder / "biomedical-text" / "documents.tsv", documents)
    for name, train in (("NCBI-disease", "train.txt"), ("JNLPBA", "train.rebuilt.txt")):
        packed(folder / f"scibert-ner-{name}" / train, chunks["train"])
        for split, place in (("valid", "dev.txt"), ("test", "test.txt")):
            (folder / f"scibert-ner-{name}" / place).write_text(chunks[split])


@pytest.mark.exhaustive  # trains word vectors three times, twice
def test_the_data_of_the_example(tmp_path: Path) -> None:
    word_data.write(tmp_path / "files", 1600, 20)
    sources(tmp_path / "given", tmp_path / "files")
    (tmp_path / "python").symlink_to(sys.executable)
    environment = dict(
        os.environ,
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        PYTHONPATH=os.pathsep.join(p for p in (str(ROOT), *sys.path) if p),
        METASEQ_LM_DATA=str(tmp_path / "given"),
    )
    command = ["bash", str(ROOT / "examples/cvt/prepare.sh"), str(tmp_path / "data")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sets = {path.parent.name for path in (tmp_path / "data").glob("*/*/train.bin")}
    assert sets == {"chunk", "pos", "dep", "ncbi", "jnlpba"}
    places = {name: tmp_path / "data" / name for name in ("general", "ncbi", "jnlpba")}
    words = {n: set((place / "words.txt").read_text().split()) for n, place in places.items()}
    for name in ("ncbi", "jnlpba"):
        assert "gene" in words[name]
        assert "genes" not in words[name], "abstracts of GENIA are left out"
    assert "wild" in words["ncbi"] and "wild-type" not in words["ncbi"]
    assert "wild-type" in words["jnlpba"]
    for place in places.values():
        vocabulary = WordVocabulary.load(place)
        assert vocabulary.vectors is not None and vocabulary.vectors.shape[1] == 100
    (first,) = WordSet(places["general"] / "dep", "test").surface(np.array([0]))
    assert first == ["``", "dogs", "''", '"']
    assert not list((tmp_path / "data").glob("*/text")) + list((tmp_path / "data").glob("*.part"))
    again = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert again.returncode == 0 and again.stdout == ""
