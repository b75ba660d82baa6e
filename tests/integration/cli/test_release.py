"""scripts/release builds what is uploaded, tries it, and says what is missing for the upload."""

import os
import subprocess
from pathlib import Path

import pytest
from outcomes import expect

from metaseq_lm import __version__

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.exhaustive
def test_release_names_what_is_missing(tmp_path: Path) -> None:
    stamps = sorted(ROOT.glob(".venv/installed*"))
    if not stamps:
        pytest.skip("this checkout has no .venv, which scripts/test makes")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    (clone / ".venv").symlink_to(ROOT / ".venv")
    changelog, citation = clone / "CHANGELOG.md", clone / "CITATION.cff"
    text = changelog.read_text().replace("## Unreleased", f"## {__version__} (2026-01-01)", 1)
    changelog.write_text(text)
    citation.write_text(citation.read_text().replace(__version__, "0.0.0"))
    for name in ("setup.cfg", "constraints.txt"):  # older than the installation, so it is kept
        os.utime(clone / name, (0, 0))
    environment = os.environ | {"EXTRAS": stamps[0].name.removeprefix("installed")}
    done = subprocess.run(
        ["bash", clone / "scripts" / "release"], env=environment, capture_output=True, text=True
    )
    expect((done.returncode, done.stderr), 1, "CITATION.cff", "not committed")
    assert "CHANGELOG.md" not in done.stderr
    assert len(list((clone / "dist").glob(f"metaseq_lm-{__version__}*"))) == 2
