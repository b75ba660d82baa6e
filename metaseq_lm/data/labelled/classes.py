"""Classes of a labelled set: their order, labels that mean "none", and labels that look wrong."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping

from metaseq_lm.core.registry import abbreviated

NO_LABEL = ""  # stands for an empty or null label
NO_GOLD = ("-", "-1")  # stand for no gold label in SNLI, MNLI and exports of HF datasets
_NULL_WORDS = {"?", "#n/a", "<na>", "n.a.", "n/a", "na", "nan", "nat", "nil", "none", "null"}
_RARE_SHARE = 0.05  # share of rows below which a label -1 means none; a class is more frequent
_FEW_ROWS = 10  # too few rows to warn about classes of one row
_FEW_CLASSES = 20
_SEPARATORS = (",", ";", "|", "+", "/", " ")
_NUMBER = re.compile(r"([+-]?(?:\d+(?:[.,]\d*)?|[.,]\d+)(?:[eE][+-]?\d+)?) ?(%?)")
_WHOLE = re.compile(r"^([+-]?\d+)\.0+\Z")
_BOOLEANS = {"true": 1.0, "false": 0.0}


def _sorted_labels(labels: set[str]) -> list[str]:
    """Return labels in order: as numbers if all are whole numbers, else by code point."""
    if all(label.isascii() and label.removeprefix("-").isdigit() for label in labels):
        return sorted(labels, key=lambda label: (int(label), label))
    return sorted(labels)


def _beside_numbers(others: set[str]) -> bool:
    """Return whether the classes other than -1 are 0, 1, ..., as in exports of HF datasets."""
    return len(others) > 1 and others == set(map(str, range(len(others))))


def gold_classes(counts: Mapping[str, int]) -> list[str]:
    """Return the sorted classes of the train split, given the number of rows of each label.

    A whole number that is written in several ways, such as 1 and 1.0, is one class. Labels that
    mean that a row has no gold label are left out: the empty label, "-" next to at least two
    classes other than "+", and a rare "-1" next to classes 0, 1, ...
    """
    spellings = defaultdict(list)
    for label in counts:
        spellings[whole_number(label)].append(label)
    by_class = {}
    for name, labels in spellings.items():
        if len(labels) == 1:
            name = labels[0]
        by_class[name] = sum(counts[label] for label in labels)
    counts = by_class
    classes = set(counts) - {NO_LABEL}
    if len(classes) > 2 and "+" not in classes:
        classes.discard("-")
    others = classes - {"-1"}
    is_rare = counts.get("-1", 0) < _RARE_SHARE * sum(counts.values())
    if _beside_numbers(others) and is_rare:
        classes = others
    return _sorted_labels(classes)


def whole_number(label: str) -> str:
    """Return a whole number without decimals, "1" for "1.0"; any other label as it is."""
    return _WHOLE.sub(r"\1", label)


def number_of(label: str) -> float | None:
    """Return the number that a label is, or None; 12 % is 0.12."""
    match = _NUMBER.fullmatch(label)
    if match is None:
        return None
    number = float(match[1].replace(",", "."))
    return number / 100 if match[2] else number


def spelling_key(label: str) -> str:
    """Return a key that a label shares with others that are perhaps the same class.

    It is the value of a number or a truth value, else the text without case, quotation marks,
    invisible characters, and the difference between blanks, "_" and "-".
    """
    characters = unicodedata.normalize("NFKC", label)
    text = "".join(c for c in characters if unicodedata.category(c) != "Cf")
    text = text.strip(" \t'\"").casefold()
    number = _BOOLEANS.get(text, number_of(text))
    if number is not None:
        return repr(number)
    return re.sub(r"[\s_-]+", " ", text)


def label_warnings(counts: Mapping[str, int]) -> Iterator[str]:
    """Yield warnings about the classes of a split; `counts` are the rows of each class."""
    rows = sum(counts.values())
    words = [label for label in counts if label.casefold() not in _NULL_WORDS]
    numbers = [number for label in words if (number := number_of(label)) is not None]
    if numbers and len(numbers) == len(words):
        fractions = any(number % 1 for number in numbers)
        if fractions or (len(counts) > _FEW_CLASSES and 2 * len(counts) > rows):
            yield (
                f"the {len(counts)} classes are numbers from {min(numbers):g} to {max(numbers):g}; "
                "if they are values to predict, preprocess with --regression"
            )
            return
    for separator in _SEPARATORS:
        joined = []
        for label in counts:
            parts = list(map(str.strip, label.split(separator)))
            if len(parts) > 1 and counts.keys() >= {*parts}:
                joined.append(label)
        if joined:
            yield (
                f"{abbreviated(sorted(map(repr, joined)))}: classes of their own; if a row has "
                f"several labels, preprocess with --label-separator '{separator}'"
            )
    groups = defaultdict(list)
    for label in sorted(counts):
        groups[spelling_key(label)].append(label)
    for labels in groups.values():
        if len(labels) > 1:
            listed = abbreviated(f"{label!r} ({counts[label]:,} rows)" for label in labels)
            yield f"{listed} are {len(labels)} classes; if they are one, write them alike"
    gold = set(gold_classes(counts))
    nulls = [name for name in counts if name.casefold() in _NULL_WORDS or name not in gold]
    if "-1" in gold and _beside_numbers(gold - {"-1"}):
        yield (
            f"'-1' ({counts['-1']:,} rows): a class; if it means that a row has no gold label, "
            f"name the others: --labels {','.join(_sorted_labels(gold - {'-1'}))}"
        )
    if nulls:
        listed = abbreviated(f"{label!r} ({counts[label]:,} rows)" for label in nulls)
        yield f"{listed}: a class; if it means that a row has no label, remove these rows"
    if len(words) == 1 == len(counts) and rows >= _FEW_ROWS:
        yield f"all {rows:,} rows have the class {words[0]!r}"
    single = [label for label, count in counts.items() if count == 1]
    if single and rows >= _FEW_ROWS:
        yield f"{len(single):,} of {len(counts):,} classes have one row: {abbreviated(single)}"
