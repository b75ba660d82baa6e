"""The hash of the code: defaults in Python and presets in YAML count."""

import hashlib
from pathlib import Path

from metaseq_lm.runs import folder
from metaseq_lm.runs.folder import add_source, code_hash, package_digest


def digest_of(root: Path) -> str:
    digest = hashlib.sha256()
    add_source(digest, root)
    return digest.hexdigest()


def test_a_changed_default_or_preset_changes_the_hash(tmp_path: Path) -> None:
    source, preset = tmp_path / "a" / "loss.py", tmp_path / "config" / "model" / "tiny.yaml"
    for file, text in ((source, "EPS = 1e-6\n"), (preset, "width: 64\n")):
        file.parent.mkdir(parents=True)
        file.write_text(text)
    (tmp_path / "a" / "plan.yaml").write_text("name: one\n")
    hashes = [digest_of(tmp_path)]
    (tmp_path / "a" / "plan.yaml").write_text("name: two\n")  # a plan has a hash of its own
    assert digest_of(tmp_path) == hashes[0]
    source.write_text("EPS = 1e-8\n")
    hashes.append(digest_of(tmp_path))
    preset.write_text("width: 128\n")
    hashes.append(digest_of(tmp_path))
    assert len(set(hashes)) == 3
    assert digest_of(source) == digest_of(source) != hashes[2]


def test_the_package_and_the_plug_in_are_hashed(tmp_path: Path) -> None:
    plug_in = tmp_path / "mine.py"
    plug_in.write_text("x = 1\n")
    alone, with_plug_in = code_hash(None), code_hash(str(plug_in))
    package = hashlib.sha256()
    add_source(package, Path(folder.__file__).parents[1])
    assert package.digest() == package_digest().digest() and alone != with_plug_in
    plug_in.write_text("x = 2\n")
    assert code_hash(str(plug_in)) not in (alone, with_plug_in)
