"""Checksums find every flipped bit; the fingerprint depends on the content alone."""

import json
import re
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.storage.indexed import IndexedWriter
from metaseq_lm.data.storage.manifest import Manifest, check_sizes, fingerprint, verify

BLOCK = 64
FILES = ["train.bin", "train.idx"]


def make(folder, documents=((1, 2, 3), (4,) * 200), command="first"):
    folder.mkdir(exist_ok=True)
    with IndexedWriter(folder / "train", np.uint16) as writer:
        for document in documents:
            writer.add(document)
    manifest = Manifest("corpus", {"hash": "x"}, {"train": {"tokens": 3}}, command)
    manifest.block_bytes = BLOCK
    manifest.add_files(folder, FILES)
    manifest.save(folder)
    return folder


def test_round_trip(tmp_path):
    make(tmp_path)
    manifest = Manifest.load(tmp_path)
    assert manifest.kind == "corpus" and manifest.splits == {"train": {"tokens": 3}}
    assert manifest.files["train.bin"]["bytes"] == 406
    assert len(manifest.files["train.bin"]["blocks"]) == 7
    assert verify(tmp_path) == check_sizes(tmp_path) == []


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_flipped_bit_is_found_and_placed(tmp_path, data):
    folder = make(tmp_path / "d")
    name = data.draw(st.sampled_from([*FILES, "manifest.json"]))
    content = bytearray((folder / name).read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    (folder / name).write_bytes(bytes(content))
    if name == "manifest.json":
        with pytest.raises(MetaseqError, match="manifest.json"):
            verify(folder)
    else:
        (fault,) = verify(folder)
        number = bit // 8 // BLOCK
        assert f"{name}: block {number} (bytes {number * BLOCK}-" in fault


def test_missing_and_cut_files(tmp_path):
    make(tmp_path)
    (tmp_path / "train.bin").write_bytes(b"1234")
    (tmp_path / "train.idx").unlink()
    assert verify(tmp_path) == check_sizes(tmp_path)
    assert any(re.search("train.bin: 4 .*406", fault) for fault in verify(tmp_path))
    assert any("train.idx: missing" in fault for fault in verify(tmp_path))


def test_swapped_files(tmp_path):
    one, two = make(tmp_path / "a"), make(tmp_path / "b", ((1, 2, 4), (4,) * 200))
    shutil.copy(two / "train.bin", one / "train.bin")
    assert len(verify(one)) == 1


def test_fingerprint_depends_on_the_content_alone(tmp_path):
    first = make(tmp_path / "a")
    assert fingerprint(first) == fingerprint(make(tmp_path / "b", command="second"))
    assert fingerprint(first) != fingerprint(make(tmp_path / "c", ((1, 2, 4), (4,) * 200)))
    assert len(fingerprint(first)) == 16
    (first / "manifest.json").unlink()
    foreign = fingerprint(first)
    (tmp_path / "b" / "manifest.json").unlink()
    assert fingerprint(tmp_path / "b") == foreign
    (tmp_path / "empty").mkdir()
    with pytest.raises(MetaseqError, match=r"\.bin and \.idx"):
        fingerprint(tmp_path / "empty")


def test_wrong_manifests(tmp_path):
    with pytest.raises(MetaseqError, match="manifest.json: no such"):
        Manifest.load(tmp_path)
    make(tmp_path)
    path = tmp_path / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "command": "edited"}))
    with pytest.raises(MetaseqError, match="damaged or edited"):
        Manifest.load(tmp_path)
    path.write_text(json.dumps({**content, "version": 2}))
    with pytest.raises(MetaseqError, match=r"format 2\b.*format 1"):
        Manifest.load(tmp_path)
    for text in ("[]", "3", "{", "", '{"checksum": 1}'):
        path.write_text(text)
        with pytest.raises(MetaseqError, match="manifest.json: "):
            Manifest.load(tmp_path)
