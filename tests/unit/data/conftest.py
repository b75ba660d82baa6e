"""Preprocessing of generated benchmark files, for the tests of this folder."""

import pytest

from metaseq_lm.cli import main


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder that holds a character tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.txt").write_text("".join(map(chr, range(32, 127))) + "\n")
    arguments = ["preprocess", "--trainpref", f"{folder}/train.txt", "--destdir", f"{folder}/data"]
    assert main([*arguments, "--tokenizer", "char", "--task-tokens", "2"]) == 0
    return folder / "data"


@pytest.fixture
def run(corpus, tmp_path, capsys):
    """Write official files and preprocess them; return (exit code, output, folder)."""

    def call(benchmark, files, *options):
        source = tmp_path / "source"
        source.mkdir(exist_ok=True)
        for name, content in files.items():
            (source / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        name = tmp_path.name.replace("_", "-")
        arguments = ["preprocess", "--benchmark", benchmark, "--source", str(source)]
        arguments += ["--destdir", str(corpus), "--labelled", name, "--overwrite", *options]
        code = main(arguments)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return code, captured.out + captured.err, corpus / name

    return call
