"""RoBERTa's tokenizer files against transformers; WordPiece's are in test_wordpiece."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors, trainers

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.tokenizers.loading import load_tokenizer

TEXT = ["It was the best of times, naïve café 漢字", "she'd said 12 or 130 <s> of them"] * 3
LINES = [*TEXT, "  two  spaces\tand\r\ntabs", "😀 \x00\x7f", "", " ", "x" * 300, "e\u0301\u00a0b"]


def roberta():
    """A byte-level BPE with RoBERTa's special symbols, <mask> last, and its post-processor."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(TEXT, trainer)
    content = json.loads(library.to_str())
    mask = content["model"]["vocab"]["<mask>"] = len(content["model"]["vocab"])
    added = {"content": "<mask>", "id": mask, "special": True, "lstrip": True}
    flags = dict.fromkeys(("single_word", "rstrip", "normalized"), False)
    content["added_tokens"].append({**added, **flags})
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    library.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return library


@pytest.fixture(scope="module", params=["tokenizer.json", "vocab.json"])
def pair(request, tmp_path_factory):
    """The same tokenizer opened here, from either form, and its library."""
    library, folder = roberta(), tmp_path_factory.mktemp("roberta")
    if request.param == "vocab.json":
        library.model.save(str(folder))
    else:
        library.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder), library


def ids_of(library, line):
    library.encode_special_tokens = True
    return library.encode(line, add_special_tokens=False).ids


def test_roberta(pair, tmp_path):
    ours, library = pair
    vocabulary = ours.vocabulary
    assert (vocabulary.pad, vocabulary.mask, vocabulary.sep) == (1, len(vocabulary) - 1, 2)
    assert (vocabulary.cls(), vocabulary.unk, vocabulary.layout) == (0, 3, "roberta")
    assert ours.encode_batch(LINES) == [ids_of(library, line) for line in LINES]
    assert [ours.decode(ids) for ids in ours.encode_batch(LINES)] == LINES
    assert ours.decode([0, *ours.encode_batch(["a b"])[0], vocabulary.mask, 2, 1]) == "a b"
    assert not set(ours.encode_batch(["<s> <mask></s>"])[0]) & set(vocabulary.specials.tolist())
    assert json.loads(ours.model_bytes())["post_processor"] is None
    ours.save(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == ours.fingerprint


@given(line=st.text(st.characters(exclude_categories=["Cs"])))
@settings(deadline=None, max_examples=100)
def test_any_text(pair, line):
    ours, library = pair
    ids = ours.encode_batch([line])[0]
    assert ids == ids_of(library, line) and ours.decode(ids) == line


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["model"].update(ignore_merges=True),
        lambda c: c["pre_tokenizer"].update(use_regex=False),
        lambda c: c["pre_tokenizer"].update(add_prefix_space=True),
    ],
    ids=["whole words first", "no words", "prefix space"],
)
def test_other_byte_level_tokenizers_are_refused(tmp_path, change):
    content = json.loads(roberta().to_str())
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(MetaseqError, match="not byte-level BPE"):
        load_tokenizer(tmp_path)


def test_older_files_without_a_type(tmp_path):
    content = json.loads(roberta().to_str())
    del content["model"]["type"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).name == "byte_bpe"
