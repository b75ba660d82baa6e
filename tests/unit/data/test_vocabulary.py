"""Special symbols, lookups and the round trip of dict.txt."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary, special_symbols

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
    assert text.splitlines() == ["[PAD] 0", "[MASK] 0", "[SEP] 0", "Ġthe 7", "a b 1"]


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


BERT = ["a", "[PAD]", "[UNK]", "b", "[CLS]", "[SEP]", "c", "[MASK]"]
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "<mask>"]


@pytest.mark.parametrize("symbols,layout", [(BERT, "bert"), (ROBERTA, "roberta")])
def test_family_layouts(tmp_path, symbols, layout):
    Vocabulary(symbols, range(len(symbols))).save(tmp_path / "dict.txt")
    vocabulary = Vocabulary.load(tmp_path / "dict.txt")
    assert vocabulary.symbols == symbols and vocabulary.counts == list(range(len(symbols)))
    ids = (vocabulary.pad, vocabulary.mask, vocabulary.sep, vocabulary.cls(), vocabulary.unk)
    assert ids == ((1, 7, 5, 4, 2) if layout == "bert" else (1, 6, 2, 0, 3))
    assert vocabulary.specials.tolist() == sorted(ids)
    assert vocabulary.unwritten == set(ids) - {vocabulary.unk}
    assert (vocabulary.layout, vocabulary.task_tokens) == (layout, 1)
    assert vocabulary.index("a") == symbols.index("a") and vocabulary.index("?") == ids[-1]
    with pytest.raises(MetaseqError, match="one task token"):
        vocabulary.cls(1)


def test_family_layout_must_be_complete_and_the_only_one():
    for lacking in BERT[1:3] + BERT[4:6] + BERT[7:]:
        with pytest.raises(ValueError, match="neither set"):
            Vocabulary([s for s in BERT if s != lacking])
    with pytest.raises(ValueError, match="both sets"):
        Vocabulary([*BERT, *(s for s in ROBERTA if s not in BERT)])
    # Our own layout wins: what else is there are words of the text.
    own = Vocabulary([*special_symbols(0), *ROBERTA, "[CLS]", "[UNK]"])
    assert (own.layout, own.pad, own.task_tokens, own.unk) == ("own", 0, 0, None)


@pytest.mark.parametrize("symbols", [BERT, ROBERTA])
def test_masking_and_words_with_a_family_layout(symbols):
    """Special symbols are neither hidden nor drawn, wherever they are."""
    from metaseq_lm.config.tasks import MaskedLMConfig
    from metaseq_lm.data.tokenizers.plain import WordTokenizer
    from metaseq_lm.tasks.masked_lm import masking_of

    vocabulary = Vocabulary(symbols)
    masking = masking_of(MaskedLMConfig(), vocabulary)
    ordinary = [i for i, s in enumerate(symbols) if s in "abc"]
    assert masking.replacements.tolist() == ordinary and masking.mask == vocabulary.mask
    words = WordTokenizer(vocabulary)
    ids = words.encode_batch([" ".join(["a", *symbols])])[0]
    assert [i for i in ids if i != vocabulary.unk] == [ordinary[0], *ordinary]
    assert words.decode([vocabulary.cls(), *ids, vocabulary.sep]).split()[0] == "a"


def test_rare_tokens_are_preferred_in_training_only():
    """Weights are count ** -rarity, with a count of 1 where there is none."""
    from metaseq_lm.config.tasks import DrawingConfig, MaskedLMConfig
    from metaseq_lm.tasks.masked_lm import masking_of

    symbols = [*special_symbols(1), "a", "b", "c"]
    vocabulary = Vocabulary(symbols, [0, 0, 0, 0, 100, 4, 0])
    config, rare = MaskedLMConfig(), DrawingConfig(mask_rarity=0.5)
    masking = masking_of(config, vocabulary, drawing=rare)
    assert masking.weights[-3:].tolist() == pytest.approx([0.1, 0.5, 1.0])
    assert masking_of(config, vocabulary, "valid", drawing=rare).weights.size == 0
    assert masking_of(config, vocabulary).weights.size == 0
    with pytest.raises(UsageError, match="mask_rarity.*dict.txt"):
        masking_of(config, Vocabulary(symbols), drawing=rare)
