"""CoNLL columns and CoNLL-U, read and written, good and malformed."""

import lzma
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from word_files import TREES

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.records.text_files import TextFile
from metaseq_lm.data.words.columns import (
    ColumnReader,
    ConlluReader,
    HeadColumnReader,
    Sentence,
    checked_tree,
    conllu_text,
)

# What a field can hold: no white space but, in CoNLL-U, single blanks inside.
FIELD = st.text(st.characters(exclude_categories=("Cs", "Cc", "Z")), min_size=1, max_size=6).filter(
    lambda t: not t.startswith(("#", "\ufeff")) and t != "-DOCSTART-"
)


def read(tmp_path, content, kind=ColumnReader, policy="replace", **options):
    path = tmp_path / "file.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    reader = kind(TextFile(path, policy), **options)
    return list(reader), reader.reading.counts


def test_first_and_last_column(tmp_path):
    found, counts = read(tmp_path, "-DOCSTART- x\n\na\tb  c\nd e\tf \n \nBOB X Y\n\n\n")
    assert [(s.words, s.labels, s.lines) for s in found] == [
        (["a", "d"], ["c", "f"], [3, 4]),
        (["BOB"], ["Y"], [6]),
    ]
    assert found[0].location(1).endswith("file.txt:4") and counts == {"documents": 1}


@pytest.mark.parametrize("subtypes, label", [(True, "nsubj:pass"), (False, "nsubj")])
def test_subtypes_of_relations_are_kept_or_cut_off(tmp_path, subtypes, label):
    rows = "1\tit:a\t_\tX:y\t_\t_\t2\tnsubj:pass\t_\t_\n2\tis\t_\tV\t_\t_\t0\troot\t_\t_\n"
    (sentence,), _ = read(tmp_path, rows, ConlluReader, subtypes=subtypes)
    assert sentence.labels == [label, "root"] and sentence.words[0] == "it:a"
    # Other fields may hold a colon that separates no subtype.
    (sentence,), _ = read(tmp_path, rows, ConlluReader, subtypes=subtypes, label=3, trees=False)
    assert sentence.labels == ["X:y", "V"]


def test_comments_have_other_columns_than_rows(tmp_path):
    found, counts = read(tmp_path, "# id 1\na X\nb Y\n\n# X\nc X\n\n# text = a b\n# Y\n")
    assert [s.words for s in found] == [["a", "b"], ["#", "c"], ["#"]]
    assert counts == {"comments": 2}


WORDS_2 = "anna N\nsleeps V\n"
WORDS_4 = "anna _ _ N\nsleeps _ _ V\n"


@pytest.mark.parametrize(
    ("content", "comments", "first", "remarks"),
    [
        *(
            ("".join(f"{comment.format(i)}\n{rows}\n" for i in range(4)), 4, "anna", remarks)
            for comment, rows, remarks in (
                ("# s{}", WORDS_2, 1),
                ("#\ts{}", WORDS_2.replace(" ", "\t"), 1),
                ("# s{}", WORDS_2.replace(" ", "\t"), 0),
                ("# id 0ffa{} domain=en", WORDS_4, 1),
                ("# text = N", WORDS_2, 0),
                ("#text a{}", WORDS_2, 1),
                ("#id{}", WORDS_2, 0),
                ("# doc{}\n" + WORDS_2, WORDS_2, 1),  # of two sentences each
                ("# s{}\n", WORDS_2, 1),
                ("% s{}", WORDS_2, 1),
                ("// s{}", WORDS_2, 1),
            )
        ),
        (f"# s0\n{WORDS_2}\n" * 12 + f"# N\n{WORDS_2}", 13, "anna", 1),
        (f"# SYM\n{WORDS_2}\n{WORDS_2}", 0, "#", 1),
        (f"# #\n{WORDS_2}\n{WORDS_2}", 0, "#", 0),
        (f"# N\n{WORDS_2}\n" * 4, 0, "#", 0),
        (f"{WORDS_2}# note\n. N\n\n" * 2, 0, "anna", 1),
        (f"% S\n{WORDS_2}\n" * 4 + f"{WORDS_2}\n" * 4, 0, "%", 0),
        ("".join(f"#joy{i} HT\n{WORDS_2}\n" for i in range(4)), 0, "#joy0", 0),
    ],
)
def test_comments_as_wide_as_rows(tmp_path, content, comments, first, remarks):
    path = tmp_path / "file.txt"
    path.write_text(content)
    reader = ColumnReader(TextFile(path))
    found = list(reader)
    counts, noted = reader.reading.counts, reader.reading.remarks
    assert counts["comments"] == comments and len(noted) == remarks
    assert found[0].words[0] == first
    if comments:
        assert {*found[-1].labels} == {"N", "V"} and "#" not in {w for s in found for w in s.words}


def test_documents_of_conll_2012(tmp_path):
    part = f"#begin document (bc/{{}});\n{WORDS_2}\n#end document\n"
    found, counts = read(tmp_path, part.format(1) + part.format(2))
    assert [s.words for s in found] == [["anna", "sleeps"]] * 2 and counts == {"documents": 4}


def test_other_columns_and_packed_files(tmp_path):
    path = tmp_path / "file.txt.xz"
    path.write_bytes(lzma.compress(b"1 a X Y\r\n2 b Z W"))
    (sentence,) = ColumnReader(TextFile(path), word_column=1, label_column=2)
    assert (sentence.words, sentence.labels) == (["a", "b"], ["X", "Z"])


@pytest.mark.parametrize(
    ("content", "words", "labels"),
    [
        ("New York\tO\n10 000\tB-X\n\nvery fast\tO\n", ["New York", "10 000"], ["O", "B-X"]),
        ("New York\tx\tO\n-\t\tB\n", ["New York", "-"], ["O", "B"]),
        ("New York\t\tO\nbe\tB\n", ["New York", "be"], ["O", "B"]),
        ("# id 1\nNew York\tO\n#a\tB\n", ["New York", "#a"], ["O", "B"]),
        ("-DOCSTART- O O\n\nNew York\tO \n", ["New York"], ["O"]),
        ("Token\tTag\nNew York\tO\n", ["New York"], ["O"]),
        ("a\tO\nb O\n", ["a", "b"], ["O", "O"]),
    ],
)
def test_tabs_separate_where_every_row_has_some(tmp_path, content, words, labels):
    sentences, _ = read(tmp_path, content)
    assert (sentences[0].words, sentences[0].labels) == (words, labels)


def test_a_no_break_space_is_a_part_of_a_word(tmp_path):
    found, _ = read(tmp_path, "10\u00a0000 O\n")
    assert found[0].words == ["10\u00a0000"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a b\nc d e\n", "file.txt:2: 3 columns, .*have 2"),
        ("a b\n\nc\n", "file.txt:3: 1 columns"),
        ("a\tb\n" * 300 + "c d\n", "file.txt:301: 1 columns, .* have 2 with tabs"),
        ("a\tb\tc\n" * 2 + "a\tb\t\n", "file.txt:3: 2 columns"),
        ("a\n", "file.txt:1: 1 columns, .*word is column 0"),
        (b"\xffa b\n", "file.txt:1: invalid UTF-8"),
    ],
)
def test_malformed_columns(tmp_path, content, message):
    with pytest.raises(MetaseqError, match=message):
        read(tmp_path, content, policy="fail")


def test_bad_bytes_drop_the_sentence_if_asked(tmp_path):
    content = b"a O\n\xff O\n\nb O\n"
    found, counts = read(tmp_path, content, policy="skip")
    assert [s.words for s in found] == [["b"]] and counts["skipped"] == 1
    assert [s.words for s in read(tmp_path, content)[0]] == [["a", "\ufffd"], ["b"]]


def test_heads_in_columns(tmp_path):
    found, _ = read(tmp_path, "I 2-nsubj\nsee 0-root\nit 2-obj-x\n", HeadColumnReader)
    assert (found[0].heads, found[0].labels) == ([2, 0, 2], ["nsubj", "root", "obj-x"])
    for label, message in {
        "3-x": "head of word 1 is 3, outside",
        "1-x": "head of word 1 is itself",
        "x": "'x' is not HEAD-RELATION",
        "-1-x": "is not HEAD-RELATION",
        "2-": "is not HEAD-RELATION",
        "9999999999-x": "is not HEAD-RELATION",
    }.items():
        with pytest.raises(MetaseqError, match=f"file.txt:1: .*{message}"):
            read(tmp_path, f"I {label}\nsee 0-root\n", HeadColumnReader)


ROW = "{}\ta\t_\tNOUN\t_\t_\t{}\tdep\t_\t_\n"


def leads_to_the_root(heads):
    """Follow each word's heads for as many steps as there are words."""
    for word in range(1, len(heads) + 1):
        for _ in heads:
            word = heads[word - 1] if word else 0
        if word:
            return False
    return True


@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.integers(0, n), min_size=n, max_size=n)))
def test_heads_that_are_no_tree_are_told(heads):
    """Without a root, with two, or in a circle, which the message names by file, line and words."""
    lines = list(range(11, 11 + len(heads)))
    read_in = Sentence("a.conllu", lines, ["w"] * len(heads), ["x"] * len(heads), heads)
    if leads_to_the_root(heads) and heads.count(0) == 1:
        assert checked_tree(read_in) is read_in
        return
    with pytest.raises(MetaseqError) as caught:
        checked_tree(read_in)
    message = str(caught.value)
    if found := re.fullmatch(r"a.conllu:(\d+): .*?words (.*) go round .*", message):
        circle = [int(word) for word in found[2].split(" -> ")]
        assert [heads[word - 1] for word in circle[:-1]] == circle[1:]
        assert circle[0] == circle[-1] and int(found[1]) == 10 + circle[0]
    elif "a sentence has one root" in message:
        second = [word for word, head in enumerate(heads) if not head][1]
        assert message.startswith(f"a.conllu:{11 + second}: ")
    elif "itself" not in message:
        assert 0 not in heads and message.startswith("a.conllu:11: no word")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ROW.format(1, 2) + ROW.format(2, 1), ":1: no word .*has head 0"),
        (ROW.format(1, 0) + ROW.format(2, 1) + ROW.format(3, 0), ":3: words 1 and 3 both"),
        (
            "# c\n" + "".join(ROW.format(i, h) for i, h in ((1, 0), (2, 3), (3, 4), (4, 2))),
            ":3: .*3 -> 4",
        ),
        ("1\ta\tb\n", ":1: 3 fields"),
        (ROW.format(1, 0).replace("\t", " "), ":1: 1 fields"),
        (ROW.format(1, 0).replace("dep", ""), ":1: field deprel is empty"),
        ("1\ta\ta\tX\t_\t_\t0\troot\t\t\n", ":1: field deps, misc is empty"),
        (ROW.format(1, 0) + ROW.format(3, 1), ":2: id '3' where 2 should"),
        ("# c\n" + ROW.format(1, 2), ":2: .*head of word 1 is 2, outside"),
        (ROW.format(1, "_"), ":1: head '_' is not a whole number"),
        (ROW.format(1, "²"), "is not a whole number"),
    ],
)
def test_malformed_conllu(tmp_path, content, message):
    with pytest.raises(MetaseqError, match=message):
        read(tmp_path, content, ConlluReader)


def test_multi_word_tokens_empty_nodes_and_fields(tmp_path):
    found, counts = read(tmp_path, TREES, ConlluReader)
    assert found[0].words == ["I", "do", "n't", "see", "-LRB-", "."]
    assert found[0].heads == [4, 4, 4, 0, 4, 4] and found[0].labels[2] == "advmod:neg"
    assert found[1].words == ["10 000", "cats"] and found[1].labels[0] == "nummod-x"
    assert counts == {"multi_word": 1, "empty_nodes": 1}
    upos, _ = read(tmp_path, TREES, ConlluReader, label=3, trees=False)
    assert upos[1].labels == ["NUM", "NOUN"] and upos[1].heads is None


@st.composite
def trees(draw):
    words = draw(st.lists(st.lists(FIELD, min_size=1, max_size=2).map(" ".join), min_size=1))
    heads = [0] * len(words)
    order = draw(st.permutations(range(1, len(words) + 1)))
    for place, word in enumerate(order[1:], 1):
        heads[word - 1] = draw(st.sampled_from(order[:place]))
    return words, heads, [draw(FIELD) for _ in words]


@given(st.lists(trees(), min_size=1, max_size=3))
def test_conllu_out_and_in(tmp_path_factory, sentences):
    path = tmp_path_factory.mktemp("conllu") / "out.conllu"
    first = "".join(conllu_text(*tree) for tree in sentences)
    path.write_text(first, encoding="utf-8")
    found = [(s.words, s.heads, s.labels) for s in ConlluReader(TextFile(path, "fail"))]
    assert found == sentences
    assert "".join(conllu_text(*tree) for tree in found) == first


@given(st.lists(st.lists(st.tuples(FIELD, FIELD), min_size=1), min_size=1, max_size=3))
def test_columns_in(tmp_path_factory, sentences):
    # A mark that opens every sentence is taken for that of comments.
    assume(not all(rows[0][0] in ("#", "%", "//", ";") for rows in sentences))
    path = tmp_path_factory.mktemp("columns") / "in.txt"
    lines = ["".join("\t".join(row) + "\n" for row in rows) + "\n" for rows in sentences]
    path.write_text("".join(lines), encoding="utf-8")
    found = [list(zip(s.words, s.labels)) for s in ColumnReader(TextFile(path, "fail"))]
    assert found == sentences


def test_trees_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="1 words.*2 heads"):
        conllu_text(["a"], [0, 1], ["root"])
