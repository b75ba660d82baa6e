"""Sets of words on disk: what preprocess writes, what WordSet reads, damage, doctor."""

import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outcomes import expect
from word_files import TREES

from metaseq_lm.cli import main
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.storage.indexed import IndexedWriter
from metaseq_lm.data.storage.manifest import Manifest, verify
from metaseq_lm.data.words.overlap import _Overlap
from metaseq_lm.data.words.sets import WordSet
from metaseq_lm.data.words.vocabulary import UNKNOWN, WordVocabulary

NOUN_VERB = "a N\nb V\n"


def labels(data):
    return [[data.label_names[i] for i in data.labels[n]] for n in range(len(data))]


def test_unlabelled_text(words):
    data = WordSet(words, "train")
    assert (data.form, len(data), data.labels, data.heads) == ("text", 3, None, None)
    sentence = "A dog barked at the cat !"
    assert data.surface([1, 2]) == [sentence.split(), ["the"] * 3]
    assert data.lengths.tolist() == [7, 7, 3]
    names = [data.vocabulary.words[i] for i in data.words[1]]
    assert names == sentence.lower().split()


def test_spans_are_stored_as_bioes(words):
    data = WordSet(words / "chunk", "train")
    assert data.spans and data.form == "tags" and data.heads is None and data.unseen is None
    assert labels(data) == [
        ["B-NP", "E-NP", "B-NP", "E-NP"],
        ["S-NP", "S-VP", "O"],
        ["O"],
        ["S-NP"],
    ]
    assert data.surface([1]) == [["it", "sat", "-LRB-"]]
    assert data.words[1][2] == data.vocabulary.index("(")
    assert Manifest.load(words / "chunk").details["scheme"] == "iob1"


def test_trees(words):
    data = WordSet(words / "trees", "train")
    assert data.label_names[0] == "root" and data.form == "trees" and not data.spans
    assert data.heads[0].tolist() == [4, 4, 4, 0, 4, 4]
    assert labels(data)[1] == ["nummod-x", "root"]
    assert data.surface([1]) == [["10 000", "cats"]]
    assert data.words[1].tolist() == [UNKNOWN, UNKNOWN]
    assert data.punctuation(np.array([0, 1])).tolist() == [False] * 4 + [True] * 2 + [False] * 2


def test_tags_of_words(words):
    data = WordSet(words / "upos", "train")
    assert not data.spans and data.label_names == "AUX NOUN NUM PART PRON PUNCT VERB".split()
    assert labels(data)[1] == ["NUM", "NOUN"]


@pytest.mark.parametrize("scheme", ["bio", "bioes"])
def test_a_wrong_scheme_names_the_line(run, words, scheme):
    content = "a B-X\nb I-X\n\nc O\nd I-X\n"
    code, shown = run(content, "--tagged", "wrong", "--tag-scheme", scheme)
    line = {"bio": 5, "bioes": 2}[scheme]
    assert code == 1 and f"train.txt:{line}: tag 'I-X'" in shown
    assert not (words / "wrong").exists()
    expect(run(content, "--tagged", "wrong"), 2, "--tag-scheme conlleval")
    assert run(content, "--tagged", f"as-{scheme}", "--tag-scheme", "conlleval")[0] == 0
    assert labels(WordSet(words / f"as-{scheme}", "train")) == [["B-X", "E-X"], ["O", "S-X"]]


def test_unseen_tags(run, words, tmp_path):
    (tmp_path / "test.txt").write_text("a N\nb S\nc V\n")
    test = ["--testpref", str(tmp_path / "test.txt")]
    assert run(NOUN_VERB, "--tagged", "own", *test)[0] == 0
    assert WordSet(words / "own", "test").label_names == ["N", "S", "V"]
    assert run(NOUN_VERB, "--tagged", "one", "--unseen-tags", "one", *test)[0] == 0
    data = WordSet(words / "one", "test")
    assert data.label_names == ["N", "V", "<unseen>"] and data.unseen == 2
    assert data.labels[0].tolist() == [0, 2, 1]
    expect(run("a B-X\n", "--tagged", "two", "--unseen-tags", "one"), 2, "not for spans")


def test_classes_of_an_earlier_set(run, words, tmp_path):
    """A later file has the same numbers for its tags; a tag that the earlier set lacks is named."""
    assert run("a N\nb V\nc A\n", "--tagged", "first")[0] == 0
    taken = ["--labels-from", str(words / "first")]
    assert run("b V\n", "--tagged", "later", *taken)[0] == 0
    later = WordSet(words / "later", "train")
    assert later.label_names == ["A", "N", "V"] and labels(later) == [["V"]]
    expect(run("a N\n\nb X\n", "--tagged", "wrong", *taken), 1, ":3: 'X'", "--labels-from")
    assert not (words / "wrong").exists()
    # Spans: types, not tags; tags that an earlier train lacked go on being one class.
    taken = ["--labels-from", str(words / "chunk")]
    assert run("it B-VP\n", "--tagged", "spans", *taken)[0] == 0
    spans, chunk = (WordSet(words / name, "train").label_names for name in ("spans", "chunk"))
    assert spans == chunk
    assert run("it B-XP\n", "--tagged", "wrong", *taken)[0] == 1
    assert run(NOUN_VERB, "--tagged", "one", "--unseen-tags", "one", "--overwrite")[0] == 0
    assert run("a N\nb X\n", "--tagged", "after", "--labels-from", str(words / "one"))[0] == 0
    after = WordSet(words / "after", "train")
    assert (after.label_names, after.unseen, labels(after)) == (
        ["N", "V", "<unseen>"],
        2,
        [["N", "<unseen>"]],
    )
    expect(run("a N\n", "--tagged", "wrong", "--labels-from", str(words)), 1, "labelled set")


def test_roots(run, words):
    for row in ("a 0-dep", "a 2-root\nb 0-root"):
        code, shown = run(row + "\n", "--treebank", "roots")
        assert code == 1 and "train.txt:1: relation" in shown and not (words / "roots").exists()
    assert run("a 0-ROOT\n", "--treebank", "roots")[0] == 0
    assert WordSet(words / "roots", "train").label_names == ["root"]


def test_hold_out(run, words):
    content = "".join(f"w{i} A\n\n" for i in range(20))
    assert run(content, "--tagged", "held", "--hold-out", "5")[0] == 0
    parts = [WordSet(words / "held", split) for split in ("train", "valid")]
    found = [[row[0] for row in data.surface(np.arange(len(data)))] for data in parts]
    assert [len(names) for names in found] == [15, 5]
    assert sorted(found[0] + found[1]) == sorted(f"w{i}" for i in range(20))
    assert [sorted(names, key=lambda n: int(n[1:])) for names in found] == found
    expect(run(content, "--tagged", "none", "--hold-out", "20"), 2, "20 sentences")


def test_overlap_is_dropped(run, words, tmp_path):
    # "No" of the test split of chunk; figures count by their number of digits.
    content = "no X\n\nit X\nsat X\n( X\n\n2001 X\n\nno X\nno X\n"
    drop = ["--drop-overlap-with", "chunk"]
    expect(run(content, "--tagged", "dropped", *drop), 0, "3 dropped")
    data = WordSet(words / "dropped", "train")
    assert data.surface(np.arange(len(data))) == [["no", "no"]]
    (tmp_path / "test.txt").write_text("the X\ncat X\n")
    options = ["--words", "--drop-overlap-with", str(tmp_path / "test.txt")]
    expect(run("a b\nThe cat\nthe cat sat\n", *options, dest="text"), 0, "1 dropped")
    found = WordSet(tmp_path / "text", "train")
    assert found.surface(np.arange(2)) == [["a", "b"], ["the", "cat", "sat"]]
    assert Manifest.load(tmp_path / "text").splits["train"]["dropped_overlap"] == 1
    # Evaluation splits stay whole.
    test = ["--testpref", str(tmp_path / "test.txt"), "--overwrite"]
    assert run("no X\n\nb X\n", "--tagged", "dropped", *test, drop[0], test[1])[0] == 0
    counts = Manifest.load(words / "dropped").splits
    assert (counts["train"]["sentences"], counts["test"]["sentences"]) == (2, 1)
    text = ["--testpref", str(tmp_path / "train.txt"), "--overwrite"]
    assert run("the cat\nb\n", *options, *text, dest="text")[0] == 0
    counts = Manifest.load(tmp_path / "text").splits
    assert (counts["train"]["sentences"], counts["test"]["sentences"]) == (1, 2)
    expect(run(content, "--tagged", "x", "--drop-overlap-with", "nothing"), 2, "nothing: neither")
    # A set without a split to evaluate on has nothing to keep out.
    expect(run(content, "--tagged", "x", "--drop-overlap-with", "trees"), 2, "trees has")


def test_a_text_of_which_all_is_dropped_says_so(run, tmp_path):
    (tmp_path / "test.txt").write_text("the X\ncat X\n")
    drop = ["--drop-overlap-with", str(tmp_path / "test.txt")]
    code, shown = run("the cat\n", "--words", *drop, dest="text")
    assert code == 1 and re.search("train.txt: no text.*--drop-overlap-with", shown)
    code, shown = run("the X\ncat X\n", "--tagged", "all", *drop)
    assert code == 1 and re.search("train.txt: no sentences.*--drop-overlap-with", shown)


@pytest.mark.parametrize(
    ("given", "same", "other"),
    [
        ("do n't -- go", ["don 't go", "Don't go !", '" DO N\'T GO "'], ["do not go", "don't"]),
        ("in 1984 , 3.5", ["in 2001 3.5", "In 1984,3.5", "( in 000 035 )"], ["in 84", "in 1984"]),
        ("-LRB- etc. -RRB-", ["( etc . )", "etc"], ["-", "lrb etc rrb"]),
        ("! ?", ["! ?"], ["?", "!", ". ."]),
    ],
)
def test_sentences_are_the_same_however_they_are_cut_into_words(given, same, other):
    known = _Overlap([given.split(), ["other", "words"]])
    assert len(known) == 2 and given.split() in known
    assert [words for words in same if words.split() not in known] == []
    assert [words for words in other if words.split() in known] == []


@given(share=st.floats(0.01, 1), larger=st.floats(0.01, 1), seed=st.integers(0, 99))
def test_fractions_are_nested(words, share, larger, seed):
    data = WordSet(words / "chunk", "train")
    small, large = (set(data.fraction(s, seed).tolist()) for s in sorted((share, larger)))
    assert small and small <= large and len(large) == max(1, round(4 * max(share, larger)))


def test_fractions_differ_by_seed(words):
    data = WordSet(words / "chunk", "train")
    assert len({tuple(data.fraction(0.5, seed)) for seed in range(20)}) > 1


def test_the_vocabulary_alone_and_taken_over(words, run, tmp_path):
    corpus = ["--labelled-corpus", str(words.parent / "trees.conllu")]
    target = ["--destdir", str(tmp_path / "alone")]
    assert main(["preprocess", "--words", *corpus, *target]) == 0
    assert WordVocabulary.load(tmp_path / "alone").words[-1] in "do n't see ( . i 00 000 cats"
    assert run("cat zebra\n", "--words", "--tokenizer-from", str(words), dest="over")[0] == 0
    data = WordSet(tmp_path / "over", "train")
    assert data.vocabulary.hash == WordVocabulary.load(words).hash
    assert data.words[0].tolist() == [data.vocabulary.index("cat"), UNKNOWN]
    counts = Manifest.load(tmp_path / "over").splits["train"]
    assert (counts["words"], counts["unknown"], counts["forms"]) == (2, 1, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--words", "--tagged", "x"], "--words and --tagged exclude each other"),
        (["--tagged", "x/y"], "letters, digits"),
        (["--tagged", "x", "--min-frequency", "2"], "--min-frequency does not"),
        (["--treebank", "x", "--tag-scheme", "bio"], "--tag-scheme does not"),
        (["--words", "--tag-column", "2"], "--tag-column does not apply to sentences"),
        (["--words", "--labels", "a"], "--labels does not apply to sentences"),
        (["--tagged", "x", "--tokenizer", "char"], "--tokenizer does not apply to tagged"),
        (["--tag-column", "2"], "give --tagged NAME or --treebank NAME"),
        (["--tagged", "x", "--tag-column", "upos"], "is for CoNLL-U"),
        (["--words", "--documents", "blank"], "needs --split-text"),
        *(
            (
                ["--words", "--tokenizer-from", "x", *option],
                f"{option[0]} and --tokenizer-from excl",
            )
            for option in (
                ["--word-vectors", "x"],
                ["--word-places", "both"],
                ["--vocab-size", "8"],
                ["--min-frequency", "2"],
                ["--tokenizer-corpus", "x"],
                ["--labelled-corpus", "x"],
            )
        ),
        (["--words", "--word-column", "1"], "CoNLL columns"),
        (["--tagged", "x", "--hold-out", "0"], "at least 1"),
        (["--tagged", "x", "--hold-out-seed", "0"], "--hold-out-seed needs --hold-out N"),
        (["--tagged", "x", "--unseen-tags", "one", "--hold-out", "1"], "not for spans"),
    ],
)
def test_wrong_options(run, words, options, message):
    expect(run("a B-X\n\nb B-X\n", *options, "--overwrite"), 2, message)
    assert not verify(words)


@pytest.mark.parametrize("name", ["t.conllu", "t.txt", "t.conll", "t.tsv", "t.csv"])
def test_conllu_is_read_whatever_its_name(run, words, name):
    """Ids are no words; the tags are the field upos unless another one is chosen."""
    code, shown = run(TREES, "--tagged", "any", "--overwrite", name=name)
    assert code == 0 and re.search("field upos.*--tag-column", shown), shown
    assert WordSet(words / "any", "train").surface(np.arange(2))[1] == ["10 000", "cats"]
    for column, message in (("3", "NOUN"), ("feats", "each tag is '_'"), ("upso", "'upos'")):
        code, shown = run(
            TREES, "--tagged", "any", "--overwrite", "--tag-column", column, name=name
        )
        assert code == (0 if column == "3" else 2 if column == "upso" else 1), shown
        assert message in shown
    assert run(TREES, "--treebank", "anytree", "--overwrite", name=name)[0] == 0
    expect(run(TREES, "--treebank", "x", "--word-column", "1", name=name), 2, "CoNLL columns")


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("word,tag\nthe,D\ncat,N\n\nit,P\n" * 9, [], "a table (word, tag) with commas"),
        ("text\tlabel\n" + "this was a very good film\tpos\n" * 9, [], "texts, not words"),
        ('{"text": "a b", "label": "x"}\n' * 9, [], "a labelled set"),
        ('{"data": [{"title": "a", "paragraphs": []}]}', [], "is JSON of SQuAD, not words"),
        ("__label__a b c\n" * 9, [], "is fastText's labelled lines"),
        ("1 the x D\n2 cat y N\n\n1 it z P\n", [], "column 0 counts the words"),
        (TREES.replace("10 000", "9").replace("\t", " "), [], "column 0 counts the words"),
        ("Sentence #,Word,Tag\n1,the,O\n1,cat,B-X\n", [], "is a table (Sentence #, Word, Tag)"),
        ("d/1 0 a D\n" + "d/1 1 b N\n" * 5, [], "column 0 is the same"),
    ],
)
def test_files_of_another_kind_are_named(run, content, options, message):
    expect(run(content, "--tagged", "x", *options, "--overwrite"), 1, message)


def test_sentences_that_run_together_are_named(run, words, capsys):
    rows = "".join(f"w{i % 7}\tB-X\n" for i in range(300))
    for content, named in ((rows, True), (rows.replace("w6\tB-X\n", "w6\tB-X\n\n"), False)):
        code, shown = run(content, "--tagged", "long", "--overwrite")
        assert code == 0 and ("300 words: a" in shown) == named
        assert main(["doctor", str(words)]) == 0
        assert ("sentence 1 of" in capsys.readouterr().out) == named


def test_tags_that_look_like_spans_are_named(run, words, capsys):
    expect(run("a PER\nb O\n\nc O\n", "--tagged", "maybe", "--overwrite"), 0, "warning", "'PER'")
    assert main(["doctor", str(words)]) == 0
    assert "maybe: train: 'O'" in capsys.readouterr().out


def test_a_column_for_a_treebank(run, words):
    """CoNLL-U says itself where relations stand; other files may have them anywhere."""
    code, shown = run("1\ta\n", "--treebank", "x", "--tag-column", "upos", name="t.conllu")
    assert code == 2 and "--tag-column upos does" in shown
    assert run("a 0-root X\n", "--treebank", "column", "--tag-column", "1")[0] == 0
    assert WordSet(words / "column", "train").label_names == ["root"]


def test_relations_of_conllu_go_without_subtypes(run, words):
    row = "1\tX\t_\tN\t_\t_\t2\tnsubj:pass\t_\t_\n2\tb\t_\tV\t_\t_\t0\troot\t_\t_\n"
    drop = ["--relation-subtypes", "drop"]
    relations = ["--tag-column", "deprel", "--tag-scheme", "none"]
    for name, options in (("tree", ["--treebank"]), ("tagged", [*relations, "--tagged"])):
        assert run(row, *drop, *options, name, name="t.conllu")[0] == 0
        assert set(WordSet(words / name, "train").label_names) == {"nsubj", "root"}
    expect(run(row, *drop, "--tagged", "parts", name="t.conllu"), 2, "--tag-column deprel")
    expect(run("a 0-root\n", *drop, "--treebank", "columns"), 2, "is for CoNLL-U")


def test_empty_and_missing(run, words, tmp_path):
    code, shown = run(" \n\n", "--tagged", "empty")
    assert code == 1 and "no sentences" in shown and not (words / "empty").exists()
    expect(run("\n\n", "--words", dest="empty"), 2, "no text to")
    code, shown = run("a A\n", "--tagged", "x", dest="nothing")
    assert code == 2 and "preprocess --words" in shown and not (tmp_path / "nothing").exists()


@pytest.fixture
def copied(words, tmp_path):
    return shutil.copytree(words, tmp_path / "copy")


def test_doctor_names_labels_that_train_lacks(run, words, tmp_path, capsys):
    (tmp_path / "test.txt").write_text("a N\nb S\n")
    assert run(NOUN_VERB, "--tagged", "lacks", "--testpref", f"{tmp_path}/test.txt")[0] == 0
    shown = doctor(words / "lacks", capsys)[1]
    assert "example of: S\n" in shown


def doctor(folder, capsys, *options):
    code = main(["doctor", str(folder), *options])
    return code, capsys.readouterr().out


def test_doctor(copied, capsys):
    code, shown = doctor(copied, capsys, "--verify")
    assert code == 0, shown
    assert re.search("3 sentences.*17 words.*longest.7", shown)
    assert "BIOES tags" in shown and re.search("6 relations.*25.0", shown)
    assert re.search(r"4 of 4.*100\.0.*in.train", shown)
    path = copied / "chunk" / "test.labels.bin"
    path.write_bytes(bytes([2]) + path.read_bytes()[1:])
    expect(doctor(copied, capsys), 1, "test.labels.bin: block 0")
    assert doctor(copied / "chunk", capsys, "--verify")[0] == 1
    (copied / "trees" / "train.heads.bin").unlink()
    expect(doctor(copied, capsys), 1, "train.heads.bin: missing")


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("trees/train.heads", [[4, 4, 4, 0, 4, 4], [2, 3]], "a head outside its sentence"),
        ("trees/train.heads", [[4, 4, 4, 0, 4, 9], [2, 0]], "a number outside"),
        ("trees/train.labels", [[0], [0]], "other sizes"),
        ("chunk/train.labels", [[0] * 4, [0] * 3, [99], [0]], "a number outside"),
        ("chunk/train.surface", [[0] * 4, [0] * 3, [-1], [0]], "a number outside"),
        ("train", [[0] * 7, [0] * 7, [1000] * 3], "a number outside"),
    ],
)
def test_files_that_do_not_fit(copied, name, values, message):
    with IndexedWriter(copied / name, np.int32) as writer:
        for row in values:
            writer.add(np.array(row))
    with pytest.raises(MetaseqError, match=message):
        WordSet((copied / name).parent, "train")


def test_another_vocabulary(copied):
    (copied / "words.txt").write_text(
        "".join((copied / "words.txt").read_text().splitlines(True)[:9])
    )
    with pytest.raises(MetaseqError, match="another vocabulary"):
        WordSet(copied / "chunk", "train")


def test_other_folders(words, tmp_path):
    with pytest.raises(MetaseqError, match="'dev'.*test, train"):
        WordSet(words / "chunk", "dev")
    Manifest("corpus", {"hash": ""}, {"train": {}}, "").save(tmp_path)
    with pytest.raises(MetaseqError, match="sentences of words"):
        WordSet(tmp_path, "train")


def test_preprocess_does_not_load_torch():
    """It takes seconds; the rows of a training batch, which need it, have a module of their own."""
    code = "import metaseq_lm.data.preprocess.word_sets, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
