"""A small data folder of words for the tests of this folder."""

import pytest
from word_files import CHUNKS, TEXT, TREES

from metaseq_lm.cli import main


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A data folder with text, the tagged set "chunk", the treebank "trees" and the tags "upos"."""
    folder = tmp_path_factory.mktemp("words")
    files = {"text.txt": TEXT, "chunk.txt": CHUNKS, "trees.conllu": TREES}
    for name, content in files.items():
        (folder / name).write_text(content)
    data = ["--destdir", str(folder / "data")]
    text = ["--trainpref", f"{folder}/text.txt", "--labelled-corpus", f"{folder}/chunk.txt"]
    assert main(["preprocess", "--words", *text, *data]) == 0
    chunk = ["--trainpref", f"{folder}/chunk.txt", "--testpref", f"{folder}/chunk.txt"]
    assert main(["preprocess", "--tagged", "chunk", *chunk, *data]) == 0
    trees = ["--trainpref", f"{folder}/trees.conllu"]
    assert main(["preprocess", "--treebank", "trees", *trees, *data]) == 0
    upos = ["--tagged", "upos", *trees, "--tag-column", "upos"]
    assert main(["preprocess", *upos, *data]) == 0
    return folder / "data"


@pytest.fixture
def run(words, tmp_path, capsys):
    """Write `content` to a file and preprocess it with `options`; return (exit code, output)."""

    def call(content, *options, name="train.txt", dest=None):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        target = str(words if dest is None else tmp_path / dest)
        found = main(["preprocess", "--trainpref", str(path), "--destdir", target, *options])
        captured = capsys.readouterr()
        return found, captured.out + captured.err

    return call
