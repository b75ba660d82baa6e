"""Damaged data folders: refused with file and bytes, or found by the checksums; never a crash.

METASEQ_LM_REPEATS sets how many mutations are tried.
"""

import contextlib
import io
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import mutations
import numpy as np
import pytest
from battery import CASES, TINY

from metaseq_lm.cli import main
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.corpus.rows import Corpus
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.storage.indexed import IndexedDataset, IndexedWriter
from metaseq_lm.data.storage.manifest import Manifest, verify
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary, special_symbols

REPEATS = int(os.environ.get("METASEQ_LM_REPEATS", "250"))
MLM = [*CASES["masked_lm"][0], *TINY, "trainer.max_update=1"]
TUNE = ["--task", "token_labels", "--criterion", "token_labels", "task.labelled=pairs", *TINY]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mutations.make_folder(tmp_path_factory.mktemp("sound"))


def restore(files: dict[Path, bytes]) -> None:
    for path, content in files.items():
        if path.read_bytes() != content:
            mutations.write(path, content)


def faults_by_checksum(data: Path) -> list[str]:
    found = []
    for folder in mutations.folders(data):
        try:
            found += verify(folder)
        except MetaseqError as error:
            found.append(str(error))
    return found


def test_no_mutation_passes_unseen(data, capsys):
    """Every mutation is refused at opening, changes no token, or is found by its checksum."""
    original = mutations.open_everything(data)
    files = mutations.snapshot(data)
    assert faults_by_checksum(data) == []
    outcomes: Counter[tuple[str, str]] = Counter()
    for number in range(REPEATS):
        rng = random.Random(number)
        mutate = mutations.ALL[number % len(mutations.ALL)]
        where = f"{number}: {mutate.__name__} {mutate(data, rng)}"
        assert mutations.snapshot(data) != files, where
        try:
            same = mutations.open_everything(data) == original
            outcome = "no token changed" if same else "left to the checksums"
            assert same or mutate in mutations.PAYLOAD, f"{where} was read without a word"
            assert mutate not in mutations.STRUCTURAL, f"{where} was opened"
        except MetaseqError as error:
            outcome = "refused at opening"
            assert str(data) in str(error) or "dict.txt" in str(error), f"{where}: {error}"
            if mutate in mutations.STRUCTURAL and mutate is not mutations.flip_header:
                assert re.search(r"\d bytes|bytes \d", str(error)), f"{where}: {error}"
        assert faults_by_checksum(data), f"{where} was not found by the checksums"
        outcomes[mutate.__name__, outcome] += 1
        restore(files)
    assert sum(outcomes.values()) == REPEATS
    with capsys.disabled():
        if "METASEQ_LM_REPEATS" in os.environ:
            print(*(f"\n{kind:<14}{what:<24}{n}" for (kind, what), n in sorted(outcomes.items())))


PROGRAM = """
import faulthandler, sys
from metaseq_lm.cli import main
faulthandler.enable()
for line in sys.stdin.read().splitlines():
    print("code", main(line.split("\\t")), flush=True)
    print("end", file=sys.stderr, flush=True)
"""


def test_no_mutation_kills_the_process(data, tmp_path):
    """The commands themselves, in another process: documented codes, one message, no signal."""
    chosen = [m for m in mutations.ALL if m not in mutations.PAYLOAD]
    commands, kinds = [], []
    for number, mutate in enumerate([*chosen, mutations.truncate, mutations.longer_index]):
        copy = tmp_path / str(number)
        shutil.copytree(data, copy, ignore=shutil.ignore_patterns("scores"))
        mutate(copy, random.Random(number))
        for options in (MLM, TUNE):
            words = ["train", str(copy), "--dry-run", *options, "trainer.max_update=1"]
            commands.append("\t".join(words))
        commands.append(f"doctor\t{copy}\t--verify")
        kinds.append(mutate)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="\n".join(commands),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    codes = [int(line[5:]) for line in done.stdout.splitlines() if line.startswith("code ")]
    said = done.stderr.split("end\n")
    assert len(codes) == len(commands) == len(said) - 1
    for number, mutate in enumerate(kinds):
        mlm, tune, doctor = codes[3 * number : 3 * number + 3]
        assert doctor == 1, commands[3 * number + 2]
        assert {mlm, tune} <= {0, 1}, commands[3 * number]
        # Which of the two commands reads the damaged file depends on where it is.
        if mutate in mutations.STRUCTURAL:
            assert mlm == 1 or tune == 1, commands[3 * number]
        for code, text in zip((mlm, tune), said[3 * number :]):
            assert text.count("metaseq-lm: ") == code, text


@pytest.mark.parametrize("name", ["train.bin", "train.idx", "valid.bin", "valid.idx"])
def test_training_notices_before_its_first_update(data, tmp_path, capsys, name):
    """The validation split too, which is read only after many updates."""
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    size = (copy / name).stat().st_size
    os.truncate(copy / name, size - 2)
    assert main(["train", str(copy), "--save-dir", str(tmp_path / "run"), *MLM]) == 1
    said = capsys.readouterr().err
    assert name in said and str(size - 2) in said and str(size) in said
    assert not list((tmp_path / "run").glob("*/update_*"))


def test_sets_and_splits_cannot_be_exchanged(data, tmp_path):
    """Files that are sound in themselves and stand in each other's place."""
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    for ending in ("bin", "idx"):
        one, two = copy / f"pairs/valid.input0.{ending}", copy / f"pairs/valid.input1.{ending}"
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)
    with pytest.raises(MetaseqError, match="valid.input0.bin: [0-9]+ bytes"):
        LabelledSet(copy / "pairs", "valid")


@pytest.mark.parametrize("code, kind", [(4, "int32"), (7, "float32")])
def test_tokens_are_whole_numbers(tmp_path, code, kind):
    """Types of one width differ in a byte of the header; as float32 every token would be 0."""
    symbols = [*special_symbols(3), "a", "b"]
    vocabulary = Vocabulary(symbols)
    with IndexedWriter(tmp_path / "train", np.int32) as writer:
        writer.add([7, 6, 7])
    index = bytearray((tmp_path / "train.idx").read_bytes())
    index[17] = code
    (tmp_path / "train.idx").write_bytes(bytes(index))
    if kind == "int32":
        rows, _ = Corpus(tmp_path, "train", vocabulary, 8, "eos").rows(np.array([0]))
        assert rows[0].tolist() == [3, 7, 6, 7, 2]
    else:
        with pytest.raises(MetaseqError, match="train.bin: holds float32"):
            Corpus(tmp_path, "train", vocabulary, 8, "eos")


def test_a_negative_token_is_refused(tmp_path):
    with IndexedWriter(tmp_path / "train", np.int32) as writer:
        writer.add([3, -1])
    with pytest.raises(MetaseqError, match="token id -1"):
        Corpus(tmp_path, "train", Vocabulary(special_symbols(3)), 8, "eos")


def damaged(field: str, value: object) -> object:
    def change(manifest: Manifest) -> None:
        place, _, key = field.partition(".")
        if key:
            getattr(manifest, place)[key] = value
        else:
            setattr(manifest, place, value)

    return change


@pytest.mark.parametrize(
    "field, value",
    [
        ("files", [1]),
        ("files.train.bin", {"bytes": 3}),
        ("files.train.bin", {"bytes": "3", "blocks": []}),
        ("files.train.bin", {"bytes": 3, "blocks": []}),
        ("files.../../train.bin", {"bytes": 0, "blocks": []}),
        ("files./etc/passwd", {"bytes": 0, "blocks": []}),
        ("splits", ["train"]),
        ("splits.../x", {}),
        ("tokenizer", {}),
        ("tokenizer", "x"),
        ("block_bytes", -1),
        ("block_bytes", 0),
        ("block_bytes", 1e9),
        ("kind", "labelled"),
    ],
)
def test_a_manifest_with_a_right_checksum_and_wrong_content(data, tmp_path, field, value):
    manifest = Manifest.load(data)
    damaged(field, value)(manifest)
    manifest.save(tmp_path)
    with pytest.raises(MetaseqError, match="manifest.json: unknown content"):
        Manifest.load(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert main(["doctor", str(tmp_path), "--verify"]) == 1
    assert "unknown content" in shown.getvalue()


def test_a_corpus_of_5_gib(tmp_path):
    """Samples whose bytes lie before, across and behind 2**31 and 2**32 are the right ones."""
    vocabulary = Vocabulary(special_symbols(3) + [chr(97 + i) for i in range(20)])
    million, documents = 1_000_000, 2700
    with IndexedWriter(tmp_path / "train", np.uint16) as writer:
        # Sparse: the sizes are given to the index, the tokens are set in the file below.
        writer._sizes.extend([million] * documents)
    places = {0: 7, 2**30 - 3: 8, 2**31 - 3: 9, million * documents - 6: 10}
    with open(tmp_path / "train.bin", "r+b") as file:
        file.truncate(2 * million * documents)
        for at, token in places.items():
            file.seek(2 * at)
            file.write(np.arange(token, token + 6, dtype="<u2").tobytes())
    if os.stat(tmp_path / "train.bin").st_blocks * 512 > 1 << 30:
        pytest.skip("this file system has no sparse files")
    corpus = Corpus(tmp_path, "train", vocabulary, million + 2, "eos")
    assert len(corpus) == documents and 2 * million * documents > 5 << 30
    stream = Corpus(tmp_path, "train", vocabulary, 6 * 90_000 + 2, "none")
    for at, token in places.items():
        wanted = list(range(token, token + 6))
        row, lengths = corpus.rows(np.array([at // million]))
        assert lengths.tolist() == [million + 2]
        assert row[0, 1 + at % million :][:6].tolist() == wanted, at
        row, _ = stream.rows(np.array([at // 540_000]))
        assert row[0, 1 + at % 540_000 :][:6].tolist() == wanted, at
        assert IndexedDataset(tmp_path / "train").tokens[at : at + 6].tolist() == wanted, at
