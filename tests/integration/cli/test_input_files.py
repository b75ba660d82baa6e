"""Files as users have them: what each becomes, or which message names the remedy. One table."""

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import tarfile

import pytest
from outcomes import expect_facts

from metaseq_lm.cli import main
from metaseq_lm.data.labelled.sets import LabelledSet

TEXT = "".join(f"The dog number {i} barks at the cat.\n" for i in range(60))
CAFE = "".join(f"The café number {i} was closed, “again”.\n" for i in range(60))
TABLE = "text,label\n" + "".join(f"the dog {i},{('pos', 'neg')[i % 2]}\n" for i in range(20))
TABS = TABLE.replace(",", "\t")
BOM = b"\xef\xbb\xbf"
ROW = '{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n'
HTML = "".join(f"<p>The dog {i} barks.</p>\n" for i in range(50))


def labels(*values: object) -> str:
    """Return CSV of 60 rows with these labels in turn."""
    return "text,label\n" + "".join(f'dog {i},"{values[i % len(values)]}"\n' for i in range(60))


def tar(text: str) -> bytes:
    """Return a tar archive of one file."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text.encode()))
    return content.getvalue()


BINARY = 1, "is binary data"
UTF_16 = 1, "is UTF-16; convert it with --encoding utf-16"
ZIP = 1, "is a zip archive (or .docx, .xlsx"
NO_TEXT = 1, "no column 'text'"
# File: content, options, exit code, phrase of the output.
CORPORA = {
    "bom.txt": (BOM + CAFE.encode(), [], 0, "60 documents"),
    "crlf.txt": (TEXT.replace("\n", "\r\n"), [], 0, "60 documents"),
    "cp1252.txt": (CAFE.encode("cp1252"), [], 1, "--encoding cp1252"),
    "named.txt": (CAFE.encode("cp1252"), ["--encoding", "cp1252"], 0, "60 documents"),
    "no_mark.txt": (CAFE.encode("utf-16-le"), [], 1, "--encoding utf-16-le"),
    "mark.txt": (CAFE.encode("utf-16"), [], *UTF_16),
    "gzip.txt": (gzip.compress(TEXT.encode()), [], 1, "gzip data; give it the suffix .gz"),
    "plain.txt.gz": (TEXT, [], 1, "Not a gzipped file"),
    "word.docx": (b"PK\x03\x04" + bytes(60), [], *ZIP),
    "word.txt": (b"PK\x03\x04" + bytes(60), [], *ZIP),
    "old.doc": (
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(99),
        [],
        1,
        "is a Word or Excel",
    ),
    "a.pdf": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", [], 1, "is a PDF; extract its text"),
    "rtf.txt": ("{\\rtf1\\ansi hi\\par}", [], 1, "is an RTF document"),
    "tokens.bin": (bytes(range(256)) * 40, [], *BINARY),
    "empty.txt": ("", [], 1, "is empty (0 bytes)"),
    "blank.txt": ("\n  \n\t\n" * 20, [], 1, "no text in 60 lines: 60 blank"),
    "giant.txt": ("the dog barks " * 20000, [], 0, "1 documents"),
    "late_nuls.txt": (TEXT * 50 + "a\0b\0\n" * 200, [], 1, "200 of 3,200 lines hold NUL bytes"),
    "one_nul.txt": (TEXT * 9 + "a\0b\n", [], 0, "NUL bytes in 1 lines"),
    "page.html": (f"<!DOCTYPE html>\n<html>\n{HTML}</html>", [], 1, "is HTML, not plain text"),
    "page.txt": (f"<html lang='en'>\n{HTML}</html>", [], 1, "extract its text first"),
    "kept.html": (f"<html>\n{HTML}</html>", ["--plain-text"], 0, "52 documents"),
    "feed.xml": (f'<?xml version="1.0"?>\n<a>\n{HTML}</a>', [], 1, "is XML, not plain text"),
    "markup.txt": (f"<p>The first paragraph.</p>\n{HTML}", [], 0, "51 documents"),
    "notes.md": (f"# Dogs\n\nSome *text*.\n\n{TEXT}", [], 0, "62 documents"),
    "array.txt": (json.dumps([{"text": "a"}] * 9), [], 1, "is JSON"),
}
CORPORA |= {
    "a.tar": (tar(TEXT), [], 1, "is a tar archive; unpack"),
    "a.tar.gz": (gzip.compress(tar(TEXT)), [], 1, "is a tar archive; unpack"),
    "a.tgz": (gzip.compress(tar(TEXT)), [], 1, "is a packed tar archive; unpack"),
    "UPPER.TXT.GZ": (gzip.compress(TEXT.encode()), [], 0, "60 documents"),
    "two.txt.gz": (gzip.compress(TEXT.encode()) * 2, [], 0, "120 documents"),
    "cut.txt.gz": (gzip.compress(TEXT.encode())[:-9], [], 1, "damaged after 0 bytes of text"),
    "cut.txt.xz": (lzma.compress(TEXT.encode())[:-9], [], 1, "damaged after 0 bytes of text"),
    "cut.txt.bz2": (bz2.compress(TEXT.encode())[:-9], [], 1, "damaged after 0 bytes of text"),
    "compress.txt.Z": (b"\x1f\x9d\x90" + b"a" * 50, [], 1, "unpack it first with uncompress"),
    "old.lzma": (lzma.compress(TEXT.encode(), lzma.FORMAT_ALONE), [], 1, "with unlzma"),
    "one_line.txt": ("one line", [], 0, "1 lines -> 1 documents"),
    "some_cr.txt": (TEXT.replace("\n", "\r", 40), [], 1, "lines end in CR alone"),
    "pickle.txt": (pickle.dumps(["the dog barks"] * 9), [], 1, "is a Python pickle"),
    "git.txt": (
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n",
        [],
        1,
        "is a pointer of Git LFS",
    ),
    "ibm.txt": (TEXT.encode("cp037"), [], 1, "--encoding cp037"),
    "columns.txt": ("The DT O\ndog NN B-A\n\n" * 20, [], 1, "set of it with --tagged NAME"),
    "trees.txt": ("# x\n1\ta\ta\tX\t_\t_\t0\troot\t_\t_\n\n" * 9, [], 1, "is CoNLL-U, not plain"),
    "sums.txt": ("I ate 3\nTO GO\nDo B-52s\n" * 9, [], 0, "27 documents"),
    "fast.txt": ("__label__pos the dog\n" * 20, [], 1, "is fastText's labelled lines"),
    "dogs.ipynb": (json.dumps({"cells": [{"source": ["a"]}]}, indent=1), [], 1, "is JSON"),
}
JAPANESE, CHINESE = "これは日本語の短い文章です。", "今天天气很好，我们一起去公园散步吧。"
for _text, _encoding in (
    (JAPANESE, "shift-jis"),
    (JAPANESE, "euc-jp"),
    (JAPANESE, "iso2022_jp"),
    (CHINESE, "gb18030"),
    ("今天天氣很好，我們一起去公園散步吧。", "big5"),
    ("오늘은 날씨가 아주 좋습니다. 함께 산책해요.", "euc-kr"),
    ("Сегодня хорошая погода, пойдём гулять.", "cp1251"),
    ("Сегодня хорошая погода, пойдём гулять.", "koi8-r"),
):
    _row = f"{_text}\n".encode(_encoding) * 30
    CORPORA[f"{_encoding}.txt"] = (_row, [], 1, f"--encoding {_encoding}")
for _name in (
    "100%",
    "a#b",
    "a=b",
    "[x]",
    "a b",
    "ü",
    "a,b",
    "it's",
    "{x}",
    "C:\\data\\x",
    "-x",
    "a\nb",
):
    CORPORA[f"{_name}.txt"] = (TEXT, [], 0, "60 documents")
SETS = {
    "bom.csv": (BOM + TABLE.encode(), [], 0, "20 rows"),
    "two_boms.csv": (BOM * 2 + TABLE.encode(), [], 0, "20 rows"),
    "joined_boms.csv": (
        (BOM + TABLE.encode()) * 2,
        [],
        0,
        "40 rows, 300 tokens, 1 repeated_header",
    ),
    "joined_boms.jsonl": ((BOM + ROW.encode()) * 2, [], 0, "4 rows"),
    "latin.csv": (TABLE.replace("dog", "café").encode("latin-1"), [], 1, "--encoding latin-1"),
    "excel.txt": (TABS.replace("\n", "\r\n").encode("utf-16"), [], *UTF_16),
    "excel16.txt": (TABS.encode("utf-16"), ["--encoding", "utf-16"], 0, "20 rows"),
    "no_mark.csv": (TABLE.encode("utf-16-le"), [], 1, "--encoding utf-16-le"),
    "sep.csv": ("sep=;\r\n" + TABLE.replace(",", ";").replace("\n", "\r\n"), [], 0, "20 rows"),
    "semicolons.csv": (TABLE.replace(",", ";").replace("\n", "\r\n"), [], 0, "20 rows"),
    "tabs.csv": (TABS.replace("\n", "\r\n"), [], 0, "neg 10, pos 10"),
    "crcrlf.csv": (TABLE.replace("\n", "\r\r\n"), [], 0, "neg 10, pos 10"),
    "cr.csv": (TABLE.replace("\n", "\r"), [], 1, "lines end in CR alone"),
    "short.csv": (TABLE + "only one\n", [], 1, "short.csv:22: 1 fields, expected 2"),
    "long.tsv": (TABS + "a\tpos\tb\n", [], 1, "long.tsv:22: 3 fields, expected 2"),
    "comma_at_end.csv": (TABLE.replace("\n", ",\n"), [], 0, "20 rows"),
    "newlines.csv": ('text,label\n"a\nb",x\n"c ""d""\n\n e",y\n', [], 0, "2 rows"),
    "newlines.tsv": ('text\tlabel\n"a\nb"\tx\n"c ""d""\n\n e"\ty\n', [], 0, "2 rows"),
    "open.csv": ('text,label\n"a,x\nb,y\n', [], 1, "open.csv:2: a quotation mark"),
    "array.json": (json.dumps([{"text": "a", "label": "x"}]), [], 0, "1 rows"),
    "indented.json": (json.dumps([{"text": "a", "label": "x"}], indent=2), [], 0, "1 rows"),
    "columns.json": ('{"text": ["a"], "label": ["x"]}', [], 1, "is JSON, one object of columns"),
    "pandas.json": ('{"text": {"0": "a"}, "label": {"0": "x"}}', [], 1, "orient='records'"),
    "nested.json": ('{"data": [{"text": "a", "label": "x"}]}', [], 0, "1 rows"),
    "gzip.csv": (gzip.compress(TABLE.encode()), [], 1, "gzip data; give it the suffix .gz"),
    "xz.jsonl": (lzma.compress(ROW.encode()), [], 1, "xz data; give it the suffix .xz"),
    "sheet.xlsx": (b"PK\x03\x04" + bytes(60), [], *ZIP),
    "sheet.csv": (b"PK\x03\x04" + bytes(60), [], 1, "as plain text or CSV"),
    "sheet.xls": (b"\xd0\xcf\x11\xe0" + bytes(99), [], 1, "as plain text or CSV"),
    "pdf.csv": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", [], 1, "is a PDF"),
    "empty.csv": ("", [], 1, "is empty (0 bytes)"),
    "blank.csv": ("\n  \n\n" * 20, [], 1, "60 blank lines"),
    "header.csv": ("text,label\n", [], 1, "no rows"),
    "repeated.csv": (TABLE * 2, [], 0, "the header again in line 22"),
    "repeated.tsv": (TABS * 2, [], 0, "40 rows"),
    "true.csv": (labels("true", "false"), [], 0, "false 30, true 30"),
    "yes.csv": (labels("yes", "no"), [], 0, "no 30, yes 30"),
    "cases.csv": (labels("yes", "Yes ", "no"), [], 0, "'Yes' (20 rows), 'yes' (20 rows) are 2"),
    "five.csv": (labels(0, 1, 2, 3, 4), [], 0, "0 12, 1 12, 2 12, 3 12, 4 12"),
    "steps.csv": (labels(0, 0.5, 1, 1.5, 2), [], 0, "values to predict"),
    "comma.csv": (labels("1,5", "2,5"), [], 0, "--regression"),
    "values.csv": (labels("1,5"), ["--regression"], 1, "write a decimal point"),
    "nan.csv": (labels("pos", "neg", "NaN"), [], 0, "'NaN' (20 rows): a class"),
    "null.csv": (labels("pos", "neg", ""), [], 0, "20 no_gold_label"),
    "nan.jsonl": ('{"text": "a", "label": NaN}\n', [], 1, "nan.jsonl:1: label nan is not finite"),
    "no_label.csv": (TABLE.replace("label", "class"), [], 1, "no column 'label'"),
    "no_text.csv": (TABLE.replace("text", "sentence"), [], *NO_TEXT),
    "twice.csv": (TABLE.replace("label", "text"), [], 1, "name occurs twice: text"),
    "case.csv": (TABLE.replace("text,", "Text,"), [], 0, "neg 10, pos 10"),
    "case2.csv": (TABLE.replace("text,", "Text,"), ["--text-column", "Text"], 0, "20 rows"),
    "blanks.csv": (TABLE.replace("text,label", " text , label "), [], 0, "20 rows"),
    "index.csv": (TABLE.replace("the dog", "0,dog").replace("text", ",text"), [], 0, "20 rows"),
    "bare.csv": (TABLE.partition("\n")[2], [], 1, "--columns if the file has"),
    "named.csv": (TABLE.partition("\n")[2], ["--columns", "text,label"], 0, "20 rows"),
    "comment.csv": ("# of 2026\n" + TABLE, [], *NO_TEXT),
    "formula.csv": (TABLE.replace("the dog 3", "=cmd|'/c calc'!A0"), [], 0, "20 rows"),
}
NESTED = '{"row": {"text": "a", "label": "x"}}\n{"row": {"text": "b", "label": "y"}}\n'
SETS |= {
    "UPPER.CSV": (TABLE.replace(",", ";"), [], 0, "20 rows"),
    "UPPER.CSV.GZ": (gzip.compress(TABLE.encode()), [], 0, "20 rows"),
    "bars.csv": (TABLE.replace(",", "|"), [], 0, "20 rows"),
    "blank_after_comma.csv": (TABLE.replace(",", ', "').replace("\n", '"\n'), [], 0, "20 rows"),
    "label_first.csv": ("label,text\n" + "1,a\n0,b\n" * 9, [], 0, "18 rows"),
    "single_quotes.csv": ("text,label\n'a, b','x'\n", [], 1, "single_quotes.csv:2: 3 fields"),
    "backslash.csv": ('text,label\n"a \\"b\\"",x\n', [], 1, "quotation marks are doubled"),
    "unquoted.csv": ("text,label\na, b,x\n", [], 1, "unquoted.csv:2: 3 fields, expected 2"),
    "note.csv": (TABLE + "\n\nSource: web\n", [], 1, "note.csv:24: 1 fields, expected 2"),
    "title.csv": ("My export,\n\n" + TABLE, [], 1, "'text'. There are: My export"),
    "page.csv": ("<!DOCTYPE html><html>\n<body>404</body>\n", [], 1, "is HTML, not a table"),
    "git.csv": ("version https://git-lfs.github.com/spec/v1\n", [], 1, "is a pointer of Git LFS"),
    "fast.txt": ("__label__pos the dog\n" * 9, [], 1, "--columns label,text"),
    "percent.csv": (labels("10%", "20 %", "30%"), [], 0, "numbers from 0.1 to 0.3; if they"),
    "percents.csv": (labels("10%"), ["--regression"], 1, "write 0.12 for 12 %"),
    "powers.csv": (labels("1e0", "2.5E-1"), ["--regression"], 0, "labels from 0.25 to 1"),
    "e0.csv": (labels("1e0", "1", "0"), [], 0, "'1' (20 rows), '1e0' (20 rows) are 2 classes"),
    "no_number.csv": (labels(1.5, ""), ["--regression"], 0, "30 no_gold_label"),
    "nan_number.csv": (labels(1.5, "NaN"), ["--regression"], 0, "30 no_gold_label"),
    "null_number.csv": (labels(1.5, "null"), ["--regression"], 0, "30 no_gold_label"),
    "none.csv": (labels("None", "a", "b"), [], 0, "'None' (20 rows): a class"),
    "pandas.csv": (labels("<NA>", "a", "b"), [], 0, "'<NA>' (20 rows): a class"),
    "excel.csv": (labels("#N/A", "a", "b"), [], 0, "'#N/A' (20 rows): a class"),
    "minus.csv": (labels("-", "a", "b"), [], 0, "20 no_gold_label"),
    "unseen.csv": (labels("a", "a\u200b", "b"), [], 0, "'a\\u200b' (20 rows) are 2 classes"),
    "accents.csv": (labels("caf\u00e9", "cafe\u0301"), [], 0, "are 2 classes"),
    "no_break.csv": (labels("a\u00a0", "b"), [], 0, "30 stripped_labels"),
    "one_class.csv": (labels("pos"), [], 0, "all 60 rows have the class 'pos'"),
    "no_row.csv": (labels("a", "b"), ["--labels", "a,b,c"], 0, "'c': no row of train has it"),
    "total.csv": (TABLE + "Total,20\n", [], 0, "1 of 3 classes have one row: 20"),
    "empty_text.csv": (TABLE + ",pos\n", [], 0, "row 22 has no text"),
    "null_text.jsonl": (
        ROW + '{"text": null, "label": "x"}\n',
        [],
        0,
        "2 rows, 2 tokens, 1 no_text",
    ),
    "lists.jsonl": ('["a", "x"]\n["b", "y"]\n', [], 1, "is JSON lines of lists"),
    "texts.jsonl": ('"a"\n"b"\n', [], 1, "not a JSON object but"),
    "pretty.jsonl": (ROW.replace("{", "{\n").replace("}", "\n}"), [], 0, "2 rows"),
    "bom.json": (BOM + b'[{"text": "a", "label": "x"}]', [], 0, "1 rows"),
    "cut.jsonl": (ROW + '{"text": "c", "la', [], 1, "cut.jsonl:3: not valid JSON"),
    "lacking.jsonl": (ROW + '{"text": "c"}\n', [], 1, "lacking.jsonl:3: no field 'label'"),
    "python.jsonl": (ROW.replace('"', "'"), [], 1, "python.jsonl:1: not valid JSON"),
    "commas.jsonl": (ROW.replace("}\n", "},\n"), [], 1, "commas.jsonl:1: not valid JSON"),
    "deep.jsonl": (NESTED, [], 1, "no column 'text'. There are: row"),
    "inner.jsonl": (
        NESTED,
        ["--text-column", "row.text", "--label-column", "row.label"],
        0,
        "x 1, y 1",
    ),
    "inner2.jsonl": (NESTED, ["--text-column", "row.txt"], 1, "no column 'label'"),
    "inner3.jsonl": (
        NESTED,
        ["--text-column", "row.txt", "--label-column", "row.label"],
        1,
        "inner3.jsonl:1: no field 'row.txt'",
    ),
}
for _name in ("100%", "a#b", "a=b", "[x]", "a b", "ü", "it's", "C:\\data\\x", "a\nb", "a\x1bb"):
    SETS[f"{_name}.csv"] = (TABLE, [], 0, "20 rows")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "c.txt").write_text(TEXT)
    options = ["--trainpref", str(folder / "c.txt"), "--destdir", str(folder / "d")]
    assert main(["preprocess", *options, "--vocab-size", "300"]) == 0
    return folder / "d"


@pytest.mark.parametrize(
    ("kind", "name"), [*(("corpus", n) for n in CORPORA), *(("set", n) for n in SETS)]
)
def test_a_file(kind, name, tokenizer, tmp_path, capsys):
    content, options, code, phrase = (CORPORA if kind == "corpus" else SETS)[name]
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    arguments = ["--trainpref", str(path), "--destdir", str(tmp_path / "d"), *options]
    arguments += ["--tokenizer-from", str(tokenizer)]
    result = main(["preprocess", *arguments, *(["--labelled", "s"] if kind == "set" else [])])
    output = "".join(capsys.readouterr())
    assert result == code and phrase in output, output
    assert (tmp_path / "d").exists() == (code == 0)
    if kind == "set" and code == 0:
        assert len(LabelledSet(tmp_path / "d" / "s", "train"))


def test_folders_of_mixed_kinds(tokenizer, tmp_path, capsys):
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXT)
    (folder / "b.jsonl").write_text(ROW)
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "a.csv").write_text(TABLE)
    (tmp_path / "sets" / "b.jsonl").write_text(ROW)
    (tmp_path / "none").mkdir()
    arguments = ["--destdir", str(tmp_path / "d"), "--tokenizer-from", str(tokenizer)]
    call = ["preprocess", *arguments, "--trainpref"]
    assert main([*call, str(folder)]) == 1
    expect_facts(capsys.readouterr().err, "b.jsonl: ", "JSON lines")
    assert main([*call, str(tmp_path / "none")]) == 1
    expect_facts(capsys.readouterr().err, "none", "without text files")
    assert main([*call, str(tmp_path / "sets"), "--labelled", "s"]) == 0
    assert "22 rows" in capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--labelled", "s"], ["--text-column", "text"]])
def test_what_is_no_file(tokenizer, tmp_path, capsys, options):
    (tmp_path / "loop.csv").symlink_to(tmp_path / "loop.csv")
    (tmp_path / "gone.csv").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.csv")
    for name, message in {
        "loop.csv": "cannot be opened: Too many levels",
        "gone.csv": "no such file",
        "pipe.csv": "is not a regular file",
        "*.csv": "no such file",
    }.items():
        arguments = ["--destdir", str(tmp_path / "d"), "--tokenizer-from", str(tokenizer)]
        code = main(["preprocess", "--trainpref", str(tmp_path / name), *arguments, *options])
        assert (
            code == 1 + (message == "no such file")
            and message in capsys.readouterr().err
            and not (tmp_path / "d").exists()
        )


@pytest.mark.parametrize(
    "names",
    [
        ["train.csv", "dev.csv"],
        ["train-00000-of-00001.csv", "test-00000-of-00001.csv"],
        ["train/a.csv", "validation/a.csv"],
    ],
)
def test_a_folder_of_several_splits_is_refused(tokenizer, tmp_path, capsys, names):
    for name in names:
        (tmp_path / "f" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "f" / name).write_text(TABLE)
    arguments = ["--destdir", str(tmp_path / "d"), "--tokenizer-from", str(tokenizer)]
    for more in (["--labelled", "s"], ["--text-column", "text"]):
        assert main(["preprocess", "--trainpref", str(tmp_path / "f"), *arguments, *more]) == 1
        expect_facts(capsys.readouterr().err, "several splits")
    path = tmp_path / "f" / names[0]
    assert main(["preprocess", "--trainpref", str(path), *arguments, "--labelled", "s"]) == 0
