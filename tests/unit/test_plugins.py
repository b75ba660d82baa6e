"""Names, where they came from, and the three ways a plug-in is loaded."""

import importlib.metadata
import re
import sys

import pytest
from outcomes import expect_error

from metaseq_lm import plugins
from metaseq_lm.cli import main
from metaseq_lm.core import registry
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import CRITERIONS, SCHEDULES, Registry

SOURCE = """
from metaseq_lm.core.registry import register_schedule

@register_schedule("{name}")
def schedule(config):
    return lambda step: 0.25
"""


def test_unknown_name_lists_the_near_ones():
    with pytest.raises(UsageError, match="'masked_ml'.*'masked_lm'.*--user-dir"):
        CRITERIONS.entry("masked_ml")


def test_a_name_belongs_to_one_module():
    registry = Registry("thing")

    def first() -> None: ...
    def second() -> None: ...

    second.__module__ = "elsewhere"
    registry.register("x")(first)
    registry.register("x")(first)
    with pytest.raises(UsageError, match="already registered by"):
        registry.register("x")(second)


def test_a_file_and_a_folder_can_be_plugins(tmp_path):
    (tmp_path / "one_file_plugin.py").write_text(SOURCE.format(name="from_file"))
    folder = tmp_path / "folder_plugin"
    folder.mkdir()
    (folder / "__init__.py").write_text("from . import inner\n")
    (folder / "inner.py").write_text(SOURCE.format(name="from_folder"))
    for path, name in ((tmp_path / "one_file_plugin.py", "from_file"), (folder, "from_folder")):
        plugins.load(str(path))
        plugins.load(str(path))
        assert SCHEDULES.build(name, None)(7) == 0.25
    with pytest.raises(UsageError, match="needs an __init__.py"):
        plugins.load(str(tmp_path))


def test_a_plugin_may_not_hide_a_module(tmp_path):
    (tmp_path / "json.py").write_text("")
    with pytest.raises(UsageError, match="'json' is loaded"):
        plugins.load(str(tmp_path / "json.py"))


class Point:
    """What importlib.metadata gives for an installed entry point."""

    def __init__(self, name: str, value: str) -> None:
        self.name, self.value = name, value


def test_installed_entry_points(tmp_path, monkeypatch, capsys):
    """A good one registers; a broken one is warned about and named when a name is not found."""
    (tmp_path / "installed_good.py").write_text(SOURCE.format(name="from_entry_point"))
    (tmp_path / "installed_bad.py").write_text("import a_missing_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    points = [Point("good", "installed_good"), Point("bad", "installed_bad:register")]
    real = importlib.metadata.entry_points
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda **query: points if query == {"group": "metaseq_lm.plugins"} else real(**query),
    )
    monkeypatch.setattr(registry, "FAILED", plugins.FAILED)
    plugins.load_all()
    assert SCHEDULES.build("from_entry_point", None)(1) == 0.25
    assert "a_missing_dependency" in capsys.readouterr().err
    with pytest.raises(UsageError, match="bad.*a_missing_dependency"):
        SCHEDULES.entry("from_the_bad_one")
    plugins.FAILED.clear()
    del sys.modules["installed_good"]


def test_list_names_the_origin(capsys):
    assert main(["list", "criterion"]) == 0
    shown = capsys.readouterr().out
    assert "meta_pseudo_label_soft" in shown and "[metaseq_lm.methods.meta_pseudo_label" in shown
    assert "(task bam)" in shown and "sizes:" not in shown
    assert main(["list", "model"]) == 0
    assert re.search("sizes:.*bert_small +BERT", capsys.readouterr().out, re.S)
    assert main(["list", "dataset-kinds"]) == 0
    assert re.search("^dataset-kind:\n.* treebank +Sentences", capsys.readouterr().out, re.S)
    expect_error(capsys, main(["list", "critrion"]), 2, "'criterion'")


@pytest.mark.parametrize(
    "line, hint",
    [
        (
            "from metaseq_lm.tasks.masked_lm import MaskedLMConfig",
            "it is in metaseq_lm.config.tasks",
        ),
        ("from metaseq_lm.tasks.options import _CorpusConfig", "it is metaseq_lm.config.tasks now"),
        ("from metaseq_lm.tasks.masked_lm import Nowhere", "cannot import name 'Nowhere'"),
    ],
)
def test_what_moved_is_named(tmp_path, line, hint):
    plugin = tmp_path / "old_plugin.py"
    plugin.write_text(line + "\n")
    with pytest.raises(UsageError, match=hint) as error:
        plugins.load(str(plugin))
    assert ("now" in str(error.value)) == ("Nowhere" not in line)
