"""Facts and spans beside the rows of a benchmark: what damage is called."""

import os

import numpy as np
import pytest
from benchmark_files import SUPERGLUE, changed, lines, without
from outcomes import expect, expect_error

from metaseq_lm.cli import main
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.storage.manifest import Manifest


@pytest.fixture
def wsc(run):
    """A set with spans and facts, split train of two rows."""
    rows = [SUPERGLUE["WSC"], changed("WSC", idx=4)]
    code, output, folder = run("superglue/WSC", {"train.jsonl": lines(*rows)})
    assert code == 0, output
    return folder


def test_damaged_facts(wsc, capsys):
    path = wsc / "train.rows.jsonl"
    whole = path.read_bytes()
    for content, message in (
        (b"x" + whole[1:], "train.rows.jsonl:1: damaged"),
        (whole.replace(b"}\n{", b"} {"), "train.rows.jsonl:1: damaged"),
        (whole.replace(b"{", b"[").replace(b"}", b"]"), "train.rows.jsonl:1: damaged"),
        (whole[:10] + b" " * 11 + b"\n", "1 lines but 2 rows"),
    ):
        path.write_bytes(content)
        assert len(content) == len(whole)
        data = LabelledSet(wsc, "train")  # facts are read when asked for
        with pytest.raises(MetaseqError, match=message):
            data.rows
        assert main(["doctor", str(wsc)]) == 1
    os.truncate(path, len(whole) - 1)
    with pytest.raises(MetaseqError, match=f"train.rows.jsonl: {len(whole) - 1}.*{len(whole)}"):
        LabelledSet(wsc, "train")
    path.unlink()
    with pytest.raises(MetaseqError, match="train.rows.jsonl: missing"):
        LabelledSet(wsc, "train")


@pytest.mark.parametrize("values", [(0, 0, 99), (1, 0, 1), (0, 2, 2), (0, -1, 3), (-1, 0, 3)])
def test_damaged_spans(wsc, values):
    path = wsc / "train.spans.bin"
    spans = np.fromfile(path, "<i4")
    spans[6:9] = values
    spans.tofile(path)
    with pytest.raises(MetaseqError, match="train.spans.bin: row 2"):
        LabelledSet(wsc, "train")


def test_unknown_form(wsc):
    manifest = Manifest.load(wsc)
    for form, inputs in (("tree", 1), ("pair", 1), ("choices", 2), ("single", 0)):
        manifest.details |= {"form": form, "inputs": inputs}
        manifest.save(wsc)
        with pytest.raises(MetaseqError, match=f"{form}.*columns"):
            LabelledSet(wsc, "train")
    manifest.details["form"] = 3
    manifest.save(wsc)
    with pytest.raises(MetaseqError, match="manifest.json:.*form"):
        LabelledSet(wsc, "train")


def test_a_replaced_set_leaves_nothing_behind(run, wsc):
    code, _, folder = run("superglue/CB", {"train.jsonl": lines(SUPERGLUE["CB"])})
    assert code == 0 and folder == wsc
    assert not (folder / "train.spans.bin").exists()


def test_some_rows_without_label(run):
    rows = lines(SUPERGLUE["CB"], {**without("CB", "label"), "idx": 4})
    expect(run("superglue/CB", {"test.jsonl": rows}), 1, "test.jsonl:2: no label")


def test_plain_files_without_labels(corpus, tmp_path, capsys):
    """A test file without label column gives a split without labels; train needs one."""
    (tmp_path / "train.tsv").write_text("text\tlabel\na\tx\nb\ty\n")
    (tmp_path / "test.tsv").write_text("text\tid\nc\t1\n")
    (tmp_path / "test.jsonl").write_text(lines({"text": "c"}, {"text": "d", "label": "x"}))
    call = ["preprocess", "--labelled", "plain", "--destdir", str(corpus), "--overwrite"]
    call += ["--trainpref", f"{tmp_path}/train.tsv"]
    assert main([*call, "--testpref", f"{tmp_path}/test.tsv"]) == 0
    data = LabelledSet(corpus / "plain", "test")
    assert data.labels is None and data.rows is None and data.spans is None and len(data) == 1
    assert (data.form, data.benchmark) == ("single", None)
    assert main([*call, "--testpref", f"{tmp_path}/test.jsonl"]) == 1
    assert "test.jsonl:2: a label" in capsys.readouterr().err
    code = main([*call, "--validpref", f"{tmp_path}/test.tsv"])
    expect_error(capsys, code, 1, "test.tsv:1:", "'label'")
