"""Damage of a data folder, as it occurs on disks, in copies and by people.

A random generator chooses a mutation, which changes the files of a folder in place. Every file is
replaced and never overwritten, so that a memory map of the old one stays readable.
"""

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from metaseq_lm.cli import main
from metaseq_lm.data.corpus.rows import Corpus
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.labelled.token_labels import TokenLabels
from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.data.storage.manifest import Manifest, fingerprint
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary

MEGATRON, FAIRSEQ = 34, 26
Mutation = Callable[[Path, random.Random], str]


def make_folder(place: Path) -> Path:
    """Write a corpus with two splits, a set of pairs with classes and a set with real values."""
    rng = random.Random(1)
    lines = [
        "".join(rng.choices("abcdefgh ", k=rng.randint(1, 30))).strip() or "a" for _ in "x" * 60
    ]
    pairs = [f"{a}\t{b}\t{len(a) % 2}" for a, b in zip(lines[:20], lines[20:40])]
    files = {
        "train.txt": lines[:45],
        "valid.txt": lines[45:],
        "train.tsv": ["text_a\ttext_b\tlabel", *pairs[:13]],
        "valid.tsv": ["text_a\ttext_b\tlabel", *pairs[13:]],
        "scores.tsv": ["text\tlabel", *(f"{a}\t{len(a) / 7}" for a in lines[:9])],
    }
    for name, content in files.items():
        (place / name).write_text("\n".join(content) + "\n")
    data = place / "data"
    to = ["preprocess", "--destdir", str(data)]
    both = ["--trainpref", f"{place}/train.%s", "--validpref", f"{place}/valid.%s"]
    corpus = [word.replace("%s", "txt") for word in both]
    labelled = [word.replace("%s", "tsv") for word in both]
    scores = ["--labelled", "scores", "--trainpref", f"{place}/scores.tsv", "--regression"]
    assert main([*to, *corpus, "--tokenizer", "char"]) == 0
    assert main([*to, *labelled, "--labelled", "pairs"]) == 0
    assert main([*to, *scores]) == 0
    return data


def prefixes(data: Path) -> list[Path]:
    """Return the pairs of files below a folder, without suffixes."""
    return sorted(p.with_suffix("") for p in data.rglob("*.idx"))


def snapshot(data: Path) -> dict[Path, bytes]:
    """Return the content of every file below a folder."""
    return {p: p.read_bytes() for p in sorted(data.rglob("*")) if p.is_file()}


def write(path: Path, content: bytes) -> None:
    """Replace a file by a new file with this content."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(content)
    os.replace(fresh, path)


def open_everything(data: Path) -> dict[str, list[list[float]]]:
    """Open a folder like `train` before its first update, then read all sequences and labels."""
    fingerprint(data)
    vocabulary = Vocabulary.load(data / "dict.txt")
    for split in ("train", "valid"):
        Corpus(data, split, vocabulary, 64, "eos")
        TokenLabels(data / "pairs", split, vocabulary, 2, 128)
    found = {"scores": [LabelledSet(data / "scores", "train").labels.tolist()]}
    for prefix in prefixes(data):
        opened = IndexedDataset(prefix)
        found[str(prefix)] = [opened[i].tolist() for i in range(len(opened))]
    return found


def any_file(data: Path, rng: random.Random, *endings: str) -> Path:
    """Return one of the nonempty .bin and .idx files."""
    files = [p for p in sorted(data.rglob("*")) if p.suffix in (endings or (".bin", ".idx"))]
    return rng.choice([p for p in files if p.stat().st_size])


def flip(path: Path, first: int, last: int, rng: random.Random) -> str:
    """Flip one bit of the bytes `first` to `last`."""
    content, at = bytearray(path.read_bytes()), rng.randrange(first, last)
    content[at] ^= 1 << rng.randrange(8)
    write(path, bytes(content))
    return f"{path.name} at {at}"


def truncate(data: Path, rng: random.Random) -> str:
    """Cut a file at any byte except the last."""
    path = any_file(data, rng)
    content = path.read_bytes()
    at = rng.randrange(len(content))
    write(path, content[:at])
    return f"{path.name} at {at}"


def empty(data: Path, rng: random.Random) -> str:
    """Empty a file."""
    path = any_file(data, rng)
    write(path, b"")
    return path.name


def append(data: Path, rng: random.Random) -> str:
    """Append bytes to a file."""
    path = any_file(data, rng)
    write(path, path.read_bytes() + rng.randbytes(rng.choice([1, 2, 4, 8, 12, 100])))
    return path.name


def flip_header(data: Path, rng: random.Random) -> str:
    """Flip a bit of magic, version, type or counts."""
    return flip(any_file(data, rng, ".idx"), 0, MEGATRON, rng)


def flip_table(data: Path, rng: random.Random) -> str:
    """Flip a bit of sizes, pointers or document indices."""
    path = any_file(data, rng, ".idx")
    return flip(path, MEGATRON, path.stat().st_size, rng)


def flip_payload(data: Path, rng: random.Random) -> str:
    """Flip a bit of tokens or labels."""
    path = any_file(data, rng, ".bin")
    return flip(path, 0, path.stat().st_size, rng)


def flip_beside(data: Path, rng: random.Random) -> str:
    """Flip a bit of a manifest, of dict.txt or of the tokenizer's options."""
    files = [p for p in sorted(data.rglob("*")) if p.suffix in (".json", ".txt")]
    path = rng.choice(files)
    return flip(path, 0, path.stat().st_size, rng)


def swap(data: Path, rng: random.Random) -> str:
    """Exchange two files with different content."""
    files = [p for p in sorted(data.rglob("*")) if p.suffix in (".bin", ".idx")]
    one, two = rng.sample(files, 2)
    while one.read_bytes() == two.read_bytes():
        one, two = rng.sample(files, 2)
    first, second = one.read_bytes(), two.read_bytes()
    write(one, second)
    write(two, first)
    return f"{one} {two}"


def swap_pairs(data: Path, rng: random.Random) -> str:
    """Exchange two whole data sets, each of them sound."""
    one, two = rng.choice(
        [
            (data / "train", data / "valid"),
            (data / "pairs/train.input0", data / "pairs/train.input1"),
            (data / "pairs/valid.input0", data / "pairs/valid.input1"),
        ]
    )
    for ending in (".bin", ".idx"):
        first, second = Path(f"{one}{ending}"), Path(f"{two}{ending}")
        was = first.read_bytes()
        write(first, second.read_bytes())
        write(second, was)
    return f"{one} {two}"


def retype(data: Path, rng: random.Random) -> str:
    """Name another data type in the header."""
    path = any_file(data, rng, ".idx")
    content = bytearray(path.read_bytes())
    content[17] = rng.choice([code for code in range(13) if code != content[17]])
    write(path, bytes(content))
    return f"{path.name} {content[17]}"


def other_header(data: Path, rng: random.Random) -> str:
    """Give Megatron's tables fairseq's header, with or without space for the document count."""
    path = any_file(data, rng, ".idx")
    content = path.read_bytes()
    cut = content[:FAIRSEQ] + content[MEGATRON:]
    without = cut[: FAIRSEQ + 12 * struct.unpack_from("<Q", content, 18)[0] - 8]
    inserted = content[:FAIRSEQ] + rng.randbytes(8) + content[FAIRSEQ:]
    write(path, rng.choice([cut, without, inserted]))
    return path.name


def longer_index(data: Path, rng: random.Random) -> str:
    """Describe more tokens than exist in an otherwise sound index."""
    path = any_file(data, rng, ".idx")
    content = path.read_bytes()
    (count,) = struct.unpack_from("<Q", content, 18)
    sizes = np.frombuffer(content, "<i4", count, MEGATRON).tolist()
    if rng.random() < 0.5:
        sizes.append(rng.randint(1, 9))
    else:
        sizes[rng.randrange(count)] += rng.choice([1, 2, 100, 2**30])
    width = Path(f"{path.with_suffix('')}.bin").stat().st_size // sum(
        np.frombuffer(content, "<i4", count, MEGATRON).tolist()
    )
    pointers = (np.cumsum(sizes) - sizes) * width
    tables = np.array(sizes, "<i4").tobytes() + pointers.astype("<i8").tobytes()
    documents = np.arange(len(sizes) + 1, dtype="<i8").tobytes()
    head = content[:18] + struct.pack("<QQ", len(sizes), len(sizes) + 1)
    write(path, head + tables + documents)
    return path.name


def rewritten(data: Path, rng: random.Random) -> str:
    """Write other tokens of the same sizes, as a second preprocessing would."""
    path = any_file(data, rng, ".bin")
    content = path.read_bytes()
    write(path, content[::-1] if content != content[::-1] else bytes(len(content)))
    return path.name


# Opening must refuse these wherever they hit ...
STRUCTURAL: list[Mutation] = [
    *(truncate, empty, append, flip_header, swap_pairs, other_header, longer_index),
]
# ... and these too, unless every token that is read is the same.
OTHERS: list[Mutation] = [swap, retype, flip_table, flip_beside]
# Only checksums can detect these; a label or token out of range is still refused.
PAYLOAD: list[Mutation] = [flip_payload, rewritten]
ALL: list[Mutation] = [*STRUCTURAL, *OTHERS, *PAYLOAD]


def folders(data: Path) -> list[Path]:
    """Return the corpus and its labelled sets."""
    return [data, *sorted(p.parent for p in data.glob("*/manifest.json"))]


def resign(folder: Path) -> None:
    """Make a manifest agree with its files, as an attacker could."""
    manifest = Manifest.load(folder)
    manifest.add_files(folder, list(manifest.files))
    manifest.save(folder)
