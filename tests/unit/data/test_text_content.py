"""What a file holds is told by its content, before a tokenizer learns from it."""

import bz2
import gzip
import io
import json
import lzma
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from outcomes import expect, expect_error

from metaseq_lm.cli import main
from metaseq_lm.data.records import text_files
from metaseq_lm.data.records.encodings import guess_encodings, guess_seven_bits
from metaseq_lm.data.records.file_kinds import Kind, recognise_lines

WORDS = "old house dogs tree cat eat sleeps blue while under café Noël".split()
LINES = [" ".join(np.random.default_rng(i).choice(WORDS, 8)).capitalize() for i in range(150)]
TEXT = "".join(f"{line} é.\n" for line in LINES)
RUSSIAN = "старый дом и собака спят под деревом\n" * 30
CHINESE = "我喜欢学习语言模型，今天天气很好。\n" * 30
ROWS = [{"text": line, "meta": {"id": i}} for i, line in enumerate(LINES)]


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", TEXT)
    return file.getvalue()


@pytest.fixture
def run(tmp_path, capsys):
    """Preprocess a file; return (exit code, output, data folder)."""

    def call(content, *options, name="train.txt", dest="data"):
        if content is not None:
            (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        folder = tmp_path / dest
        source = name if name == "-" else f"{tmp_path}/{name}"
        arguments = ["--trainpref", source, "--destdir", str(folder), "--vocab-size", "400"]
        code = main(["preprocess", *arguments, *options])
        return code, "".join(capsys.readouterr()), folder

    return call


def token_bytes(folder: Path) -> list[bytes]:
    return [(folder / f"train.{suffix}").read_bytes() for suffix in ("bin", "idx")]


@pytest.mark.parametrize(
    "content, message",
    [
        (TEXT.encode("latin-1"), "150 of 150 lines hold invalid UTF-8"),
        (TEXT.encode("latin-1"), "--encoding latin-1"),
        ("“quoted” text\n".encode("cp1252") * 50, "--encoding cp1252"),
        (TEXT.encode() + "“caf”\n".encode("cp1252") * 20, "--encoding cp1252"),
        (RUSSIAN.encode("cp1251"), "--encoding cp1251"),
        (RUSSIAN.encode("koi8-r"), "--encoding koi8-r"),
        (CHINESE.encode("gb18030"), "--encoding gb18030"),
        ((TEXT + "é\n").encode() + b"caf\xe9\n" * 3, "3 of 154 lines"),
        (TEXT.encode("utf-16"), "is UTF-16; convert it with --encoding utf-16"),
        (TEXT.encode("utf-16-le"), "mark; convert it with --encoding utf-16-le"),
        (TEXT.encode("utf-16-be"), "--encoding utf-16-be"),
        (TEXT.encode("utf-32-le"), "--encoding utf-32-le"),
        (TEXT.encode("utf-32"), "is UTF-32;"),
        (CHINESE.encode("utf-16-le"), "--encoding utf-16-le"),
        (np.random.default_rng(0).bytes(5000), "is binary data, not text"),
        (TEXT.replace("cat", "c\0t"), "NUL bytes"),
        ("one line\n" * 500 + "a\0b" * 3 + "\nc\0\n" * 9, "NUL bytes, the first is line 501"),
        (b"\x01\x02\x03abc\n" * 40, "is binary data"),
        (TEXT.replace("\n", "\r"), "its lines end in CR alone"),
        (zipped(), "is a zip archive"),
        (b"PAR1" + TEXT.encode() + b"PAR1", "is a Parquet file"),
        (b"ARROW1\0\0" + TEXT.encode(), "is an Arrow file"),
        (b"%PDF-1.7\n" + TEXT.encode(), "is a PDF"),
        (b"x" * 257 + b"ustar" + TEXT.encode(), "is a tar archive"),
        (gzip.compress(TEXT.encode()), "gzip data; give it the suffix .gz"),
        (bz2.compress(TEXT.encode()), "bzip2 data; give it the suffix .bz2"),
        ("".join(json.dumps(row) + "\n" for row in ROWS), "is JSON lines"),
        (json.dumps(ROWS), "is JSON in an array"),
        (json.dumps(ROWS, indent=2), "is JSON in an array"),
        ("".join(json.dumps([line, 1]) + "\n" for line in LINES), "is JSON lines"),
        ("id\ttext\n" + "".join(f"{i}\t{t}\n" for i, t in enumerate(LINES)), "table of 2 columns"),
        ("".join(f"{i}\t{t}\n" for i, t in enumerate(LINES)), "a table of 2 columns with tabs"),
        ("id,text\n" + "".join(f'{i},"{t}, ""x"""\n' for i, t in enumerate(LINES)), "table (id, "
            "text)"),
        ("".join(f'"{i}","{t}, and more"\n' for i, t in enumerate(LINES)), "table without a header "
            "row"),
        ("".join(f"{i},{t}, x\n" for i, t in enumerate(LINES)), "is a table"),
        ("id;text\n" + "".join(f"{i};{t}\n" for i, t in enumerate(LINES)), "with semicolons"),
    ],
)  # fmt: skip
def test_what_is_no_plain_text_is_refused(run, content, message):
    code, output, folder = run(content)
    assert code == 1 and message in output, output
    assert "train:" not in output and not folder.exists()


@pytest.mark.parametrize(
    "content",
    [
        TEXT,
        "\ufeff" + TEXT,
        TEXT + "caf\ufffd\n",
        TEXT.encode() + b"one damaged line \xe9\n",
        TEXT + "one line with NUL \0\n",
        "Name, age, and so on\n" + "Hello, my friend, today\n" * 20,
        "\tindented code;\n" * 30,
        '"Quoted," she said, "and so on"\n' * 30,
        '"Quoted", she said\n' * 30,
        "3, 5 or 7\n1,000 dogs\n" * 30,
        "{ not JSON } at all\n" * 30,
        "[1] A footnote\n[2] Another one\n" * 20,
        "a\n",
        "x" * 300_000,
    ],
)
def test_plain_text_is_read(run, content):
    code, output, _ = run(content)
    assert code == 0, output


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-16-le", "utf-32-be"])
def test_encoding_converts(run, encoding):
    _, _, plain = run(TEXT)
    code, output, folder = run(TEXT.encode(encoding), "--encoding", encoding, dest="other")
    assert code == 0, output
    assert token_bytes(folder) == token_bytes(plain)


def test_a_character_may_lie_on_the_border_of_two_blocks(tmp_path):
    (tmp_path / "f").write_bytes("漢字\n".encode("utf-16") * 50)
    file = text_files.TextFile(tmp_path / "f", encoding="utf-16")
    assert b"".join(file.chunks(3)).decode().startswith("漢字\n")


@pytest.mark.parametrize(
    "content, encoding, code, message",
    [
        (TEXT, "latin-1", 1, "is UTF-8, not latin-1; leave --encoding out"),
        (TEXT.encode("latin-1"), "ascii", 1, "not ascii"),
        (TEXT, "klingon", 2, "--encoding klingon: no text encoding"),
        (TEXT, "base64", 2, "--encoding base64: no text encoding"),
    ],
)
def test_wrong_encodings_are_named(run, content, encoding, code, message):
    actual, output, folder = run(content, "--encoding", encoding)
    assert (actual, message in output) == (code, True), output
    assert not folder.exists()


def test_options_allow_what_is_refused_and_the_doctor_names_it(run, capsys):
    rows = "".join(json.dumps(row) + "\n" for row in ROWS)
    for number, (content, option, message) in enumerate(
        [
            (TEXT.encode("latin-1"), "--on-bad-utf8=replace", "150 lines held invalid UTF-8"),
            (TEXT.encode("latin-1"), "--on-bad-utf8=replace", "150 of the first 150 texts hold"),
            (rows, "--plain-text", "its text looks like JSON lines"),
            (TEXT.encode("utf-16-le"), "--plain-text", "binary data, or text"),
            ("id\ttext\n" + "a\tb c\n" * 9, "--plain-text", "a table of 2 columns"),
        ]
    ):
        code, output, folder = run(content, option, dest=f"d{number}")
        assert code == 0, output
        assert main(["doctor", str(folder)]) == 0
        assert f"warning  {folder}" in (output := capsys.readouterr().out) and message in output


def test_labelled_sets_of_another_encoding_are_refused(run, tmp_path, capsys):
    _, _, folder = run(TEXT)
    rows = "text\tlabel\n" + "café\ta\nNoël\tb\n" * 20
    (tmp_path / "train.tsv").write_bytes(rows.encode("latin-1"))
    arguments = ["preprocess", "--labelled", "set", "--trainpref", f"{tmp_path}/train.tsv"]
    expect_error(capsys, main([*arguments, "--destdir", str(folder)]), 1, "40 of 41")
    assert main([*arguments, "--destdir", str(folder), "--on-bad-utf8", "replace"]) == 0
    assert main(["doctor", str(folder)]) == 0
    assert "train: 40 lines" in capsys.readouterr().out
    assert main([*arguments, "--destdir", str(folder), "--overwrite", "--encoding=latin-1"]) == 0


def standard_input(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_every_form_of_a_text_makes_the_same_corpus(run, tmp_path, monkeypatch):
    _, _, plain = run(TEXT)
    lines = TEXT.splitlines(keepends=True)
    (tmp_path / "folder" / "c").mkdir(parents=True)
    for name, part in (("b", lines[50:90]), ("a.txt", lines[:50]), ("c/a", lines[90:])):
        (tmp_path / "folder" / name).write_text("".join(part))
    (tmp_path / "folder" / ".hidden").write_bytes(b"\0")
    forms = {
        "t.gz": gzip.compress(TEXT.encode()),
        "t.xz": lzma.compress(TEXT.encode()),
        "t.bz2": bz2.compress(TEXT.encode()),
        "folder": None,
    }
    for name, content in forms.items():
        code, output, folder = run(content, name=name, dest=f"of_{name}")
        assert code == 0, output
        assert token_bytes(folder) == token_bytes(plain), name
    for dest, content in (("in", TEXT.encode()), ("packed", gzip.compress(TEXT.encode()))):
        standard_input(monkeypatch, content)
        code, output, folder = run(None, name="-", dest=dest)
        assert code == 0 and "on standard input" in output
        assert token_bytes(folder) == token_bytes(plain)


def test_zstd(run, tmp_path):
    zstandard = pytest.importorskip("zstandard")
    _, _, plain = run(TEXT)
    packed = zstandard.compress(TEXT.encode())
    code, output, folder = run(packed * 1, name="t.zst", dest="zst")
    assert code == 0 and token_bytes(folder) == token_bytes(plain)
    assert run(packed + packed, name="two.zst", dest="two")[0] == 0
    expect(run(packed[:-9], name="cut.zst", dest="cut"), 1, "cut.zst: damaged after")


def test_standard_input_that_cannot_be_used(run, monkeypatch):
    standard_input(monkeypatch, b"")
    expect(run(None, name="-"), 1, "input: is empty")
    standard_input(monkeypatch, TEXT.encode("latin-1"))
    expect(run(None, name="-"), 1, "150 of 150")
    expect(run(None, "--validpref", "-", name="-"), 2, "named twice")
    monkeypatch.setattr(sys, "stdin", None)
    code, output, folder = run(None, name="-")
    assert code == 1 and "input: is closed" in output
    assert not folder.exists()


def test_words_are_of_plain_text_too(run, tmp_path, capsys):
    rows = "".join(json.dumps(row) + "\n" for row in ROWS)
    for name, content in (("c.jsonl", rows), ("f/a.txt", TEXT)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    arguments = ["preprocess", "--words", "--destdir", f"{tmp_path}/words", "--trainpref"]
    expect_error(capsys, main([*arguments, f"{tmp_path}/c.jsonl"]), 1, "c.jsonl: is JSON")
    assert main([*arguments, f"{tmp_path}/f"]) == 0
    assert main([*arguments, f"{tmp_path}/c.jsonl", "--plain-text", "--overwrite"]) == 0


def test_a_file_in_a_folder_that_is_no_text_is_named(run, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text(TEXT)
    (tmp_path / "folder" / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    expect(run(None, name="folder"), 1, "PNG image")


def test_forms_of_lines():
    for lines in ([], ["", " "], ["a,b"], ["a\tb"]):
        assert recognise_lines(lines).kind is Kind.TEXT


ARTICLE = {  # article 1 of the Universal Declaration of Human Rights
    "Tous les êtres humains naissent libres et égaux en dignité et en droits. Où ça?": "latin-1 "
    "mac-roman cp850",
    "Menschen sind gleich an Würde. Die Straße war schön, Äpfel und Öl": "latin-1 mac-roman",
    "The café on the corner of a street serves “naïve” people who come and go every day and do not "
    "speak a word of any language but their own, as far as we can tell from here": "cp1252",
    "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności": "cp1250 iso8859-2 cp852",
    "Všichni lidé se rodí svobodní a sobě rovní co do důstojnosti a práv.": "cp1250 iso8859-2",
    "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar.": "cp1254",
    "Visi žmonės gimsta laisvi ir lygūs savo orumu ir teisėmis. Šeši įėjimai.": "cp1257",
    "Все люди рождаются свободными и равными в своём достоинстве и правах.": "cp1251 koi8-r "
    "iso8859-5 cp866 mac-cyrillic",
    "Всі люди народжуються вільними і рівними у своїй гідності та правах.": "cp1251 koi8-u",
    "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια": "cp1253 iso8859-7 cp737",
    "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם. כולם חוננו בתבונה": "iso8859-8 cp1255 "
    "cp862",
    "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق. وقد وهبوا عقلا": "cp1256 iso8859-6",
    "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ": "tis-620",
    "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心": "gb18030",
    "人人生而自由，在尊嚴和權利上一律平等。他們賦有理性和良心": "big5 gb18030",
    "すべての人間は、生まれながらにして自由であり": "shift-jis euc-jp",
    "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.": "euc-kr",
    "All human beings are born free and equal in dignity and rights": "cp037",
}


@pytest.mark.parametrize(
    "text, encoding", [(text, name) for text, names in ARTICLE.items() for name in names.split()]
)
def test_the_first_guess_reads_the_text_and_others_are_few(text, encoding):
    data = f"{text}\n".encode(encoding)
    guesses = guess_encodings(data)
    assert data.decode(guesses[0]) == f"{text}\n" and len(guesses) <= 2, guesses


@pytest.mark.parametrize(
    "data",
    [
        "Vi\xd6t l\xb5 m\xe9t n\xad\xedc \xae\xd1p, ti\xd5ng Vi\xd6t".encode("latin-1"),  # TCVN
        b"Vi\xaet l\xe0 m\xb5t n\xdf\xbec \xf0\xa9p, ti\xaang Vi\xaet",  # VISCII
        "старый дом и собака ".encode("cp1251") + "спят под".encode("cp866"),
        np.random.default_rng(0).bytes(400),
    ],
)
def test_no_guess_where_no_language_fits(data):
    assert guess_encodings(data) == []


@pytest.mark.parametrize(
    "text, encoding",
    [
        ("你好，我们今天学习语言。", "hz"),
        ("これは日本語の短い文章です。", "iso2022_jp"),
        ("오늘은 날씨가 좋습니다.", "iso2022_kr"),
        ("Menschen sind an Würde gleich, Äpfel und Brüder.", "utf-7"),
        ("Все люди рождаются", "utf-7"),
    ],
)
def test_text_of_seven_bits_is_refused(run, text, encoding):
    expect(run(f"{text}\n".encode(encoding) * 20), 1, f"--encoding {encoding}")
    assert run(None, "--encoding", encoding)[0] == 0


def test_signs_of_encodings_in_ascii():
    for text in (b"a+bcd-e x+123- +abc-", rb"Figure~{\ref} ~{ab~} ~ 5", b"1+1- +500- +1000-"):
        assert not guess_seven_bits(text)
