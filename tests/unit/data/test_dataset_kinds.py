"""Kinds of datasets that plug-ins register: options, recognition, and the pipeline they run."""

import sys
from pathlib import Path

import pytest
from outcomes import expect_error

from metaseq_lm.cli import main
from metaseq_lm.data.preprocess.pipeline import DATASET_KINDS
from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.data.storage.manifest import Manifest, verify

POEMS = '''"""Poems, a verse a line: the number of characters of each verse."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from metaseq_lm.core.options import option
from metaseq_lm.data.preprocess.pipeline import Pipeline, register_dataset_kind
from metaseq_lm.data.storage.indexed import IndexedWriter


@dataclass(frozen=True)
class PoemOptions:
    """Options of poems."""

    NOUN: ClassVar[str] = "poems"
    UNUSED_WITH: ClassVar[dict[str, str]] = {"rhymes": "vocab_size"}
    poems: str = option("", "the files are poems, written to D/NAME", metavar="NAME")
    rhymes: bool = option(False, "count rhymes")
    longest: int = option(80, "longest verse", at_least=2)
    vocab_size: int = option(7, "")


@register_dataset_kind("poems", PoemOptions)
class Poems(Pipeline):
    """Makes a dataset of poems."""

    kind, unit = "poems", "verses"

    def __init__(self, options, request):
        super().__init__(request.inside(options.poems))
        self.options = options

    def prepare(self):
        return {"name": "none", "hash": ""}

    def read(self, split):
        for path in split.sources:
            for _, text, _ in self.request.text_file(path).lines():
                yield text[: self.options.longest]

    def encode(self, split, records):
        return map(len, records)

    def write(self, split, encoded):
        with IndexedWriter(self.folder / split.name, np.int32) as writer:
            for number in encoded:
                writer.add([number])
                split.counts["verses"] += 1
        split.files = [f"{split.name}.bin", f"{split.name}.idx"]

    def finish(self, splits):
        return {"vocab_size": self.options.vocab_size}

    def summary(self, split):
        return f"{split.name}: {split.counts['verses']} verses"
'''


@pytest.fixture
def plugin(tmp_path: Path) -> list[str]:
    """Return the options that load the plug-in; its kind is forgotten at the end."""
    (tmp_path / "poem_plugin.py").write_text(POEMS)
    (tmp_path / "poem.txt").write_text("a rose\nis a rose\n")
    yield ["preprocess", "--user-dir", f"{tmp_path}/poem_plugin.py", "--destdir", str(tmp_path)]
    DATASET_KINDS.entries.pop("poems", None)
    sys.modules.pop("poem_plugin", None)


def test_plugin_kind_makes_a_dataset(plugin, tmp_path, capsys):
    options = ["--poems", "verse", "--trainpref", f"{tmp_path}/poem.txt", "--longest", "7"]
    assert main([*plugin, *options]) == 0
    assert "train: 2 verses" in capsys.readouterr().out
    assert IndexedDataset(tmp_path / "verse" / "train").tokens.tolist() == [6, 7]
    manifest = Manifest.load(tmp_path / "verse")
    assert (manifest.kind, manifest.details) == ("poems", {"vocab_size": 7})
    assert manifest.splits["train"]["verses"] == 2 and verify(tmp_path / "verse") == []
    assert "--user-dir" in manifest.command and "--longest 7" in manifest.command
    (tmp_path / "poem.txt").write_text("")
    assert main([*plugin, *options, "--overwrite"]) == 1


def test_plugin_options_stand_in_the_help(plugin, capsys):
    with pytest.raises(SystemExit):
        main([*plugin, "--help"])
    shown = capsys.readouterr().out
    assert "poems:\n  --poems NAME" in shown and "(default: 80)" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rhymes"], "--rhymes only applies to poems; give --poems"),
        (["--poems", "x", "--labelled", "y"], "--labelled and --poems"),
        (["--poems", "x", "--labels", "a"], "--labels does not apply to poems"),
        (["--poems", "x", "--longest", "1"], "--longest must be at least 2, got 1"),
        (["--poems", "x", "--rhymes", "--vocab-size", "8"], "--vocab-size and --rhymes"),
        (["--poems", "x/y", "--trainpref", "z"], "name of a set 'x/y'"),
        (["--longst", "3"], "Did you mean '--longest'"),
    ],
)
def test_wrong_plugin_options_are_refused(plugin, capsys, options, message):
    expect_error(capsys, main([*plugin, *options]), 2, message)
