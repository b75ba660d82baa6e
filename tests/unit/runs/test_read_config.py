"""config.yaml is read as OmegaConf writes and reads it; what no run wrote is refused."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from metaseq_lm.core.config import as_dict
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.loading import load_config
from metaseq_lm.runs.folder import read_config

SCALARS = (
    *("1e-3", "1E5", "-1.5e3", "+2.e-1", "1_0e2", "1_000", ".5", ".5e-3", ".5e3", "1.", "1__0e5"),
    *("1e", "e3", "1e3x", "0x1F", "0b11", ".inf", "-.INF", ".nan", "inf"),
    *("yes", "off", "True", "~", "null", "", "2026-11-28", "2026-11-28 10:00:00", "${a.b}"),
    *("1e-3 # text", "'1e-3'", '"\\u00e9"', "[a, 1e-3, {b: [1]}]", "{1: a, 2.5: b}"),
)


@pytest.mark.parametrize("text", SCALARS)
def test_scalars_are_those_of_omegaconf(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"key: {text}\n")
    expected = OmegaConf.to_container(OmegaConf.load(file))
    assert repr(read_config(file)) == repr(expected)  # 1 is not 1.0, nor True


def test_what_a_run_writes_is_read_back(tmp_path: Path) -> None:
    config = as_dict(load_config(["task=masked_lm", "criterion=masked_lm", "optimizer.lr=1e-5"]))
    config["texts"] = [*SCALARS, "a: b", "*x", "&x", "- a", "=", "<<", "é\u2028\n\t"]
    file = tmp_path / "config.yaml"
    OmegaConf.save(OmegaConf.create(config), file)
    assert read_config(file) == config


LEVELS = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
BOMB = "\n".join(["a0: &a0 [x]", *LEVELS]) + "\n"


def test_small_aliases_and_merges_are_read(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("a: &a {x: 1, y: 2}\nb: &b {<<: *a, y: 3}\nc: {<<: *b, z: [*a, *a]}\n")
    assert read_config(file) == OmegaConf.to_container(OmegaConf.load(file))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: &x [*x]\n", "line 1, column 4: an alias"),
        (BOMB, "line 5, column 5: its aliases"),
        ("a: 1\nb: {c: 1, c: 2}\n", "it has the key c twice"),
        ("a: 1\ntime: 24:00:00\n", "line 2, column 7: 24:00:00"),
        ("seeds: [1, 010]\n", "line 1, column 12: 010"),
        ("a: !!timestamp 2026-11-28\n", "it has a date"),
        ("a: !!set {b, c}\n", "it has a set"),
        ("a: !!binary YQ==\n", "it has a bytes"),
        ("a: !!python/object/apply:os.system [exit]\n", "could not determine a constructor"),
        ("? [a, b]\n: 1\n", "line 1, column 3: found unhashable key"),
        ("a: " + "[" * 60 + "]" * 60, "nested more than 50 deep"),
        ("a: " + "[" * 500_000, "nest"),
        ("- " * 500_000, "nest"),
        ("- a\n", "not a mapping"),
        ("", "not a mapping"),
        ("a: [1\n", "line 2, column 1: did not find expected"),
    ],
)
def test_what_no_run_wrote_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(MetaseqError, match="config.yaml: not") as error:
        read_config(tmp_path / "config.yaml")
    assert problem in str(error.value)
