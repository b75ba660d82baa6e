"""What a file is, is recognised by its content, and named where another kind is expected."""

import io
import json
import pickle
import re
import zipfile

import pytest

from metaseq_lm.cli import main
from metaseq_lm.data.records.file_kinds import Kind, recognise_lines

CONLLU = "# text = a b\n1-2\tab\t_\t_\t_\t_\t_\t_\t_\t_\n" + "".join(
    f"{i}\tw\tw\tNOUN\tN\t_\t{i - 1}\t{'root' if i == 1 else 'dep'}\t_\t_\n" for i in (1, 2)
)
SQUAD = {"version": "v2.0", "data": [{"title": "T", "paragraphs": [{"context": "c", "qas": []}]}]}
FILES = {
    Kind.TEXT: "a text\nof some lines, and more\n",
    Kind.JSON_LINES: '{"text": "a b", "label": "x"}\n' * 3,
    Kind.JSON_LISTS: '["a b", "x"]\n' * 3,
    Kind.JSON_ARRAY: json.dumps([{"text": "a b", "label": "x"}] * 3, indent=1),
    Kind.JSON_OBJECTS: json.dumps({"text": "a b", "label": "x"}, indent=1),
    Kind.JSON_COLUMNS: json.dumps({"text": {"0": "a b"}, "label": {"0": "x"}}),
    Kind.SQUAD: json.dumps(SQUAD),
    Kind.TABLE: "text\tlabel\n" + "a b\tx\nc d\ty\n" * 3,
    Kind.COLUMNS: "EU NNP B-ORG\nsleeps VBZ O\n\nit PRP O\n" * 3,
    Kind.CONLLU: CONLLU,
    Kind.FASTTEXT: "__label__x a b\n" * 3,
    Kind.HTML: "<!DOCTYPE html>\n<html><body>a</body></html>\n",
    Kind.XML: '<?xml version="1.0"?>\n<a>b</a>\n',
}


@pytest.mark.parametrize("kind", FILES)
def test_each_kind_is_recognised(kind):
    content = FILES[kind]
    assert recognise_lines(content.split("\n")).kind is kind
    spaced = content.replace("\n", "\n\n").split("\n")
    assert recognise_lines(spaced).kind is kind or "\n\n" in content


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("the DT\ncat NN\n\nit PRP\nis VBZ\n\n" * 3, Kind.COLUMNS),
        ("Anna\tb_per\nsleeps\to\n\nin\to\n" * 3, Kind.COLUMNS),
        ("John Smith\nMary Jones\n\nAnna Kurz\n" * 3, Kind.TEXT),
        ("text\tlabel\nI like it\tO\nno\tO\n" * 1 + "so so\tO\n" * 30, Kind.TABLE),
        ("1\tw\t_\tX\t_\t_\t0\troot\t_\t_\n", Kind.CONLLU),
        ("\t".join("0 news f.txt 2012 24 MSRvid MSRvid a b".split()) + "\t5.0\n", Kind.TEXT),
        ("[1] A footnote\n[2] Another one\n", Kind.TEXT),
        ('{"text": "a"\n{"text": "b"}\n{"text": "c"}\n', Kind.JSON_LINES),
        ('{"text": "' + "a" * 300_000, Kind.JSON_LINES),
        (json.dumps(SQUAD, indent=1), Kind.SQUAD),
    ],
)
def test_files_between_two_kinds(content, kind):
    assert recognise_lines(content.split("\n")).kind is kind


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", "a b\n")
    return file.getvalue()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    (folder / "t.txt").write_text("a b c d w it x\n" * 9)
    arguments = ["--trainpref", f"{folder}/t.txt", "--destdir", f"{folder}/data"]
    assert main(["preprocess", *arguments, "--tokenizer", "word"]) == 0
    return folder / "data"


CORPUS, LABELLED = (), ("--labelled", "x")
TAGGED = ("--tagged", "x")
QUESTIONS, WORDS = ("--benchmark", "squad/v2.0"), ("--words",)


@pytest.mark.parametrize(
    ("options", "content", "message"),
    [
        (CORPUS, FILES[Kind.CONLLU], "CoNLL-U, .*--treebank"),
        (CORPUS, FILES[Kind.SQUAD], "is JSON of SQuAD, not plain text"),
        (LABELLED, FILES[Kind.CONLLU], "is CoNLL-U, not"),
        (LABELLED, FILES[Kind.COLUMNS], r"columns \(CoNLL\), not a table"),
        (LABELLED, FILES[Kind.SQUAD], "is JSON of SQuAD, not a table"),
        (LABELLED, FILES[Kind.HTML], "is HTML, not"),
        (TAGGED, FILES[Kind.SQUAD], "is JSON of SQuAD, not words"),
        (TAGGED, FILES[Kind.FASTTEXT], "is fastText's labelled lines, not words"),
        (QUESTIONS, FILES[Kind.CONLLU], "CoNLL-U, .*SQuAD; .*--treebank"),
        (WORDS, FILES[Kind.TABLE], "2 columns .*plain"),
        *((options, zipped(), "is a zip archive") for options in (CORPUS, LABELLED, TAGGED, WORDS)),
        *(
            (options, pickle.dumps({"text": ["a"]}), "is a Python pickle")
            for options in (LABELLED, TAGGED, QUESTIONS)
        ),
        ((*LABELLED, "--encoding", "latin-1"), zipped(), "is a zip archive"),
    ],
)
def test_a_file_of_another_kind_is_named_with_what_reads_it(
    data, tmp_path, capsys, options, content, message
):
    path = tmp_path / "train.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    destdir = tmp_path / "w" if options in (CORPUS, WORDS) else data
    arguments = ["preprocess", *options, "--trainpref", str(path), "--destdir", str(destdir)]
    assert main(arguments) == 1
    shown = capsys.readouterr().err
    assert re.search(message, shown), shown


def test_parallel_text_is_no_table(tmp_path, capsys):
    for language, content in (("en", FILES[Kind.TABLE]), ("vi", FILES[Kind.TEXT])):
        (tmp_path / f"t.{language}").write_text(content)
    languages = ["--source-lang", "en", "--target-lang", "vi"]
    files = ["--trainpref", f"{tmp_path}/t", "--destdir", f"{tmp_path}/d"]
    assert main(["preprocess", "--parallel", "x", *files, *languages]) == 1
    assert "2 columns" in capsys.readouterr().err
