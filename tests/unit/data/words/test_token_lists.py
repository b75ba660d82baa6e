"""Tagged sets from JSON lines with lists of tokens and tags, as `datasets` exports them."""

import json

import pytest

NAMES = ["O", "B-PER", "I-PER", "B-LOC"]
SENTENCES = [["the", "dog", "barks", "loud"], ["a", "cat"]]
NUMBERS = [[0, 1, 2, 3], [3, 0]]


def rows(**fields):
    """Return JSON lines with SENTENCES as tokens and lists of `fields`."""
    records = [
        {"id": str(i), "tokens": words, **{name: values[i] for name, values in fields.items()}}
        for i, words in enumerate(SENTENCES)
    ]
    return "".join(json.dumps(row) + "\n" for row in records)


def test_numbers_and_names_give_the_set_that_columns_give(run, words):
    names = [[NAMES[number] for number in numbers] for numbers in NUMBERS]
    columns = "\n".join(
        "".join(f"{word} {tag}\n" for word, tag in zip(*pair)) for pair in zip(SENTENCES, names)
    )
    code, output = run(columns, "--tagged", "columns")
    assert code == 0, output
    for i, (content, options) in enumerate(
        [
            (rows(ner_tags=NUMBERS), ("--tag-names", ",".join(NAMES))),
            (rows(ner_tags=names), ()),
            (rows(pos_tags=NUMBERS, ner_tags=names), ("--tag-column", "ner_tags")),
        ]
    ):
        code, output = run(content, "--tagged", f"lists{i}", *options, name="train.jsonl")
        assert code == 0, output
        expected = sorted((words / "columns").glob("*.bin"))
        assert expected
        for path in expected:
            assert (words / f"lists{i}" / path.name).read_bytes() == path.read_bytes()


def test_numbers_as_classes_of_words(run, words):
    code, output = run(
        rows(pos=NUMBERS), "--tagged", "numbers", "--tag-scheme", "none", name="train.jsonl"
    )
    assert code == 0, output


@pytest.mark.parametrize(
    ("content", "options", "code", "message"),
    [
        (rows(ner_tags=NUMBERS), (), 1, "train.jsonl:1: tag '0' is not a name"),
        (rows(ner_tags=NUMBERS), ("--tag-names", "O,B-X"), 1, "tag '2' is"),
        (rows(a=NUMBERS, b=NUMBERS), (), 2, "--tag-column NAME: a, b"),
        (rows(), (), 2, "--tag-column NAME, and there is none"),
        (rows(ner_tags=NUMBERS), ("--tag-column", "ner_tag"), 1, "Did you mean 'ner_tags'?"),
        (rows(ner=[[0], [1]]), ("--tag-column", "ner"), 1, ":1: 1 ner for 4 tokens"),
        (json.dumps({"tokens": ["a b"], "ner": ["O"]}), (), 1, ":1: token 'a b' is not a word"),
        (json.dumps({"text": "a b", "ner": ["O"]}), (), 1, ":1: no field 'tokens'"),
    ],
)
def test_wrong_lists(run, words, content, options, code, message):
    actual, output = run(content, "--tagged", "wrong", *options, name="train.jsonl")
    assert actual == code and message in output, output
    assert not (words / "wrong").exists()
