"""WordPiece against transformers' BERT tokenizer; training, saving, offsets, foreign files."""

import json
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from metaseq_lm.cli import main
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.tokenizers.loading import load_tokenizer, tokenizer_class

TEXT = [
    "It was the best of times, it was the worst of times; it wasn't 1984 yet.",
    "She'd said: \"I'll go, they're late\" - but we've only 12 or 130 of them.",
    "  indented   text\twith tabs and a no-break\u00a0space, naïve café, 漢字 and ½ ²",
    "ångström ÉCLAIR e\u0301 ﬁne 한국어 Ελλάς 😀 the times of the best worst it",
] * 5
LINES = [
    "Naïve CAFÉ déjà-vu Ångström \u0130stanbul \u1e9e ß \ufb01ne",
    "漢字かな交じり文 한국어 和ABC字 \U00020000",
    "control\x00\x01\x7f\u200b\ufeff\u00ad characters\x0b\x0c\x1c\x85 here \ufffd",
    "tab\tnew\rreturn\u00a0no-break\u3000wide\u2028line  double   triple",
    "emoji 😀👩\u200d👩\u200d👧 flags 🇩🇪 skin 👍🏽",
    "x" * 99 + " " + "x" * 100 + " " + "x" * 101 + " " + "a" * 5000,
    "don't [stop] (now), $5.00 a_b^c`d~e|f \u2019quoted\u201d \u00a7\u00b6",
    "combining e\u0301\u0323 \u0e33 \u1100\u1161 \u05d0\u05b8 \u0301alone",
    "",
    " ",
]
any_text = st.text(st.characters(exclude_categories=["Cs"]))
pieces = st.sampled_from(
    [*" \t\n\x0b\u00a0éÉßİ漢字,.!'\u0301\u200b\x00ab", "ab", "##a", "the", "x" * 101]
)


@pytest.fixture(scope="module")
def trained():
    """One small tokenizer that ignores case, and one that does not."""
    kind = tokenizer_class("wordpiece")
    return {c: kind.train(iter(TEXT), 260, 3, cased=c) for c in (False, True)}


def theirs(folder, **options):
    transformers = pytest.importorskip("transformers")
    return transformers.BertTokenizerFast.from_pretrained(folder, **options)


def write_vocabulary(folder, tokenizer, cased):
    """Write vocab.txt in BERT's layout with the pieces of a trained tokenizer."""
    folder.mkdir()
    ordinary = tokenizer.vocabulary.symbols[len(tokenizer.vocabulary.specials) :]
    symbols = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *ordinary]
    (folder / "vocab.txt").write_text("\n".join(symbols) + "\n", encoding="utf-8")
    settings_file = folder / "tokenizer_config.json"
    settings_file.write_text(json.dumps({"do_lower_case": not cased}))


@pytest.fixture(scope="module", params=[False, True], ids=["uncased", "cased"])
def pair(request, trained, tmp_path_factory):
    """The same vocab.txt opened here and by transformers."""
    folder = tmp_path_factory.mktemp("bert") / "vocab"
    write_vocabulary(folder, trained[request.param], request.param)
    return load_tokenizer(folder), theirs(folder, do_lower_case=not request.param), folder


def test_vocab_txt_gives_the_ids_of_transformers(pair):
    ours, other, _ = pair
    expected = [other(line, add_special_tokens=False)["input_ids"] for line in LINES + TEXT]
    assert ours.encode_batch(LINES + TEXT) == expected
    assert ours.encode_batch(LINES + TEXT) == expected  # now from the cache
    assert len({i for ids in expected for i in ids}) > 60
    vocabulary = ours.vocabulary
    found = (vocabulary.pad, vocabulary.mask, vocabulary.sep, vocabulary.cls(), vocabulary.unk)
    assert found == (
        *(other.pad_token_id, other.mask_token_id, other.sep_token_id),
        *(other.cls_token_id, other.unk_token_id),
    )


@given(line=st.lists(pieces, max_size=12).map("".join) | any_text)
@settings(deadline=None, max_examples=200)
@example(line="\u0130")
@example(line="a\u0301 \u0301b")
def test_any_text_gives_the_ids_of_transformers(pair, line):
    ours, other, _ = pair
    # Here text that looks like a special symbol stays text, there it becomes one.
    assume(not any(symbol in line for symbol in other.all_special_tokens))
    expected = other(line, add_special_tokens=False, return_offsets_mapping=True)
    assert ours.encode_batch([line]) == [expected["input_ids"]]
    ids, starts, ends = ours.encode_with_offsets(line)
    assert ids == expected["input_ids"]
    assert list(zip(starts, ends)) == expected["offset_mapping"]


def test_tokenizer_json_of_transformers(pair, tmp_path):
    ours, other, _ = pair
    other.save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").unlink(missing_ok=True)
    again = load_tokenizer(tmp_path)
    assert again.vocabulary.symbols == ours.vocabulary.symbols
    assert again.encode_batch(LINES) == ours.encode_batch(LINES)
    assert "post_processor" not in again.model_bytes().decode() or (
        json.loads(again.model_bytes())["post_processor"] is None
    )


def test_training_is_deterministic_in_every_process(trained):
    """The library's own trainer is not: its pieces depend on the seed of a hash table."""
    code = (
        "from metaseq_lm.data.tokenizers.wordpiece import WordPiece\n"
        f"print(WordPiece.train({TEXT!r}, 260, 3).fingerprint)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [trained[False].fingerprint]


def test_training(trained):
    symbols = trained[False].vocabulary.symbols
    assert symbols[:7] == ["[PAD]", "[MASK]", "[SEP]", "[CLS0]", "[CLS1]", "[CLS2]", "[UNK]"]
    assert len(symbols) <= 260 and len(set(symbols)) == len(symbols)
    assert {"times", "the", "naive", "##s", "漢"} <= set(symbols)
    assert not {"É", "é"} & set(symbols) and "É" in trained[True].vocabulary
    kind = tokenizer_class("wordpiece")
    with pytest.raises(UsageError, match="--vocab-size 7 .*wordpiece"):
        kind.train(TEXT, 7, 3)
    # More characters than there is room for: the rarest have no piece.
    small = kind.train(TEXT, 20, 0)
    assert len(small.vocabulary) == 20 and {"t", "##e"} <= set(small.vocabulary.symbols)
    assert small.encode_batch(["t 漢"])[0][-1] == small.vocabulary.unk


@pytest.mark.parametrize("cased", [False, True])
def test_saving(trained, cased, tmp_path):
    tokenizer = trained[cased]
    names = tokenizer.save(tmp_path)
    assert sorted(names) == ["dict.txt", "tokenizer.json", "tokenizer_options.json"]
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint
    lines = [*TEXT, *LINES, "lone \ud800 half"]
    assert loaded.encode_batch(lines) == tokenizer.encode_batch(lines)
    values, sizes = loaded.encode_packed(lines)
    assert values.dtype == np.uint16 and sizes.tolist() == list(
        map(len, loaded.encode_batch(lines))
    )


def test_special_looking_text_stays_text(trained):
    tokenizer = trained[True]
    ids = tokenizer.encode_batch(["[MASK] a [SEP]b [CLS0] [PAD] [UNK]"])[0]
    assert not set(ids) & (set(tokenizer.vocabulary.specials.tolist()) - {tokenizer.vocabulary.unk})


@given(line=any_text)
@settings(deadline=None, max_examples=100)
def test_encoding_what_was_decoded_gives_the_same_text(trained, line):
    tokenizer = trained[True]
    ids = tokenizer.encode_batch([line])[0]
    text = tokenizer.decode(ids)
    if tokenizer.vocabulary.unk not in ids:
        assert tokenizer.decode(tokenizer.encode_batch([text])[0]) == text
    assert "[MASK]" not in tokenizer.decode([tokenizer.vocabulary.mask, *ids])


def test_offsets_point_at_the_original_text(trained):
    text = "  Naïve Times, 漢字!"
    ids, starts, ends = trained[False].encode_with_offsets(text)
    symbols = [trained[False].vocabulary.symbols[i] for i in ids]
    shown = "".join(text[a:b] for a, b in zip(starts, ends))
    assert shown == "NaïveTimes,漢字!"
    assert ids == trained[False].encode_batch([text])[0] and symbols[0].startswith("n")
    assert trained[False].encode_with_offsets("a\ud800b")[2][-1] == 3


def test_preprocess_trains_and_takes_over(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(TEXT), encoding="utf-8")
    first = ["preprocess", "--trainpref", f"{tmp_path}/a.txt", "--destdir", f"{tmp_path}/data"]
    assert main([*first, "--tokenizer", "wordpiece", "--vocab-size", "200"]) == 0
    tokenizer = load_tokenizer(tmp_path / "data")
    write_vocabulary(tmp_path / "bert", tokenizer, False)
    again = ["preprocess", "--trainpref", f"{tmp_path}/a.txt", "--destdir", f"{tmp_path}/other"]
    assert main([*again, "--tokenizer-from", f"{tmp_path}/bert"]) == 0
    other = load_tokenizer(tmp_path / "other")
    assert other.vocabulary.layout == "bert" and other.vocabulary.cls() == 3
    assert sum(other.vocabulary.counts) == sum(map(len, other.encode_batch(TEXT)))


def replaced(**changes):
    return lambda content: {**content, **changes}


@pytest.mark.parametrize(
    "change,said",
    [
        (replaced(normalizer=None), "BERT's normaliser"),
        (replaced(pre_tokenizer={"type": "Whitespace"}), "BERT's normaliser"),
        (replaced(model=None), "not a JSON object"),
        (replaced(added_tokens=[]), ""),
        (
            lambda c: {**c, "model": {**c["model"], "continuing_subword_prefix": "@@"}},
            "begin with ##",
        ),
        (
            lambda c: {
                **c,
                "added_tokens": [],
                "model": {**c["model"], "vocab": {"[UNK]": 0, "a": 1}},
            },
            "neither set",
        ),
    ],
)
def test_other_tokenizers_are_refused(pair, tmp_path, change, said):
    content = json.loads(pair[0].model_bytes())
    (tmp_path / "tokenizer.json").write_text(json.dumps(change(content)))
    if not said:
        assert load_tokenizer(tmp_path).vocabulary.layout == "bert"
        return
    with pytest.raises(MetaseqError, match=said):
        load_tokenizer(tmp_path)


def test_added_tokens_that_are_not_berts_are_refused(pair, tmp_path):
    library = tokenizers.Tokenizer.from_str(pair[0].model_bytes().decode())
    library.add_tokens(["[ENTITY]"])
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(MetaseqError, match=r"added tokens \[ENTITY\]"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("cased", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"do_lower_case": False},
        {"do_lower_case": True, "tokenizer_class": "BertTokenizer"},
        {"tokenizer_class": "ElectraTokenizer"},
        {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False},
    ],
)
def test_settings_win_over_the_normalizer_of_a_tokenizer_json(trained, tmp_path, settings, cased):
    """As in the transformers library, whichever of them a program has changed."""
    transformers = pytest.importorskip("transformers")
    write_vocabulary(tmp_path / "bert", trained[cased], cased)
    theirs(tmp_path / "bert", do_lower_case=not cased).save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "vocab.txt").unlink(missing_ok=True)
    (tmp_path / "saved" / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = load_tokenizer(tmp_path / "saved")
    kind = getattr(transformers, settings.get("tokenizer_class", "BertTokenizer") + "Fast")
    other = kind.from_pretrained(tmp_path / "saved")
    texts = [*LINES, *TEXT, "Café CAFÉ 漢字 Hello"]
    found = [other(line, add_special_tokens=False)["input_ids"] for line in texts]
    assert ours.encode_batch(texts) == found
    # A class that reads the file as it is.
    plain = {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": cased}
    (tmp_path / "saved" / "tokenizer_config.json").write_text(json.dumps(plain))
    as_it_is = load_tokenizer(tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer_config.json").unlink()
    assert as_it_is.encode_batch(texts) == load_tokenizer(tmp_path / "saved").encode_batch(texts)


@pytest.mark.parametrize(
    "files,said",
    [
        ({"vocab.txt": "[PAD]\na\na\n"}, "the symbol 'a' twice"),
        ({"vocab.txt": b"[PAD]\n\xff\n"}, "cannot be read"),
        ({"vocab.txt": "a\nb\n"}, "neither set"),
        ({"vocab.txt": "", "tokenizer_config.json": "{"}, "tokenizer_config.json: damaged"),
        ({"vocab.json": "{", "merges.txt": ""}, "vocab.json, merges.txt"),
        ({"vocab.json": "{}"}, "no tokenizer here"),
        ({"tokenizer.json": '{"model": {"type": "Unigram"}}'}, "only with its spm.model"),
    ],
)
def test_damaged_files(tmp_path, files, said):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(MetaseqError, match=said):
        load_tokenizer(tmp_path)
