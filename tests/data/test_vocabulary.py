"""Special symbols, lookups and the round trip of dict.txt."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metaseq_lm.data.vocabulary import Vocabulary, special_symbols
from metaseq_lm.errors import MetaseqError

ODD = [
    " ",
    "  ",
    "\n",
    "\r",
    "\t",
    "\\",
    "\\n",
    "\\\n",
    "\x00",
    "\u2028",
    "\x85",
    "\ufeff",
    "a b",
    "",
]


def test_special_symbols_come_first():
    assert special_symbols(2) == ["[PAD]", "[MASK]", "[SEP]", "[CLS0]", "[CLS1]"]
    vocabulary = Vocabulary([*special_symbols(2, unk=True), "a", "[CLS2]"])
    assert (vocabulary.pad, vocabulary.mask, vocabulary.sep) == (0, 1, 2)
    assert (vocabulary.cls(), vocabulary.cls(1), vocabulary.unk) == (3, 4, 5)
    assert vocabulary.specials.tolist() == [0, 1, 2, 3, 4, 5]
    assert vocabulary.index("a") == 6 and vocabulary.index("nothing") == 5
    assert "a" in vocabulary and len(vocabulary) == 8
    with pytest.raises(MetaseqError, match="--task-tokens"):
        vocabulary.cls(2)


def test_without_unk():
    vocabulary = Vocabulary([*special_symbols(30), "a"])
    assert vocabulary.unk is None
    assert vocabulary.cls(29) == 32
    assert vocabulary.specials.tolist() == list(range(33))
    with pytest.raises(KeyError):
        vocabulary.index("nothing")


def test_wrong_symbols_are_refused():
    with pytest.raises(ValueError, match="'a' occurs twice"):
        Vocabulary([*special_symbols(1), "a", "b", "a"])
    with pytest.raises(ValueError, match="the first symbols"):
        Vocabulary(["<s>", "<pad>", "</s>", "a"])
    with pytest.raises(ValueError, match="counts"):
        Vocabulary(special_symbols(1), [1])


symbols_strategy = st.lists(
    st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(ODD), unique=True
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(symbols_strategy, st.integers(0, 10**12))
def test_any_symbol_comes_back(tmp_path, symbols, count):
    symbols = special_symbols(3) + [s for s in symbols if s not in special_symbols(3)]
    path = tmp_path / "dict.txt"
    Vocabulary(symbols, [count] * len(symbols)).save(path)
    loaded = Vocabulary.load(path)
    assert loaded.symbols == symbols
    assert loaded.counts == [count] * len(symbols)
    assert path.read_bytes().count(b"\n") == len(symbols)


def test_plain_symbols_are_written_as_fairseq_does(tmp_path):
    Vocabulary([*special_symbols(0), "Ġthe", "a b"], [0, 0, 0, 7, 1]).save(tmp_path / "dict.txt")
    text = (tmp_path / "dict.txt").read_text(encoding="utf-8")
    assert text == "[PAD] 0\n[MASK] 0\n[SEP] 0\nĠthe 7\na b 1\n"


@pytest.mark.parametrize(
    "content, message",
    [
        (b"[PAD] 0\n[MASK]\n", ":2: expected 'symbol count'"),
        (b"[PAD] 0\n[MASK] x\n", ":2: expected 'symbol count'"),
        (b"[PAD] 0\n[MASK] 0\n[SEP] 0\n\xff 1\n", ":4: not valid UTF-8"),
        (b"[PAD] 0\n[MASK] 0\n[SEP] 0", "last line is cut off"),
        (b"[PAD] 0\n[MASK] 0\n[SEP] 0\na 0\na 0\n", "'a' occurs twice"),
        (b"", "the first symbols"),
    ],
)
def test_damaged_dict(tmp_path, content, message):
    (tmp_path / "dict.txt").write_bytes(content)
    with pytest.raises(MetaseqError, match="dict.txt.*" + message):
        Vocabulary.load(tmp_path / "dict.txt")
