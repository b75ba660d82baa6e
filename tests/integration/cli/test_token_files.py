"""`merge` and `import-corpus`: the bytes are those of one `preprocess` on one machine."""

import json
import struct
from itertools import accumulate
from pathlib import Path

import pytest
import tokenizers
from battery import TINY
from tokenizers import decoders, models, pre_tokenizers

from metaseq_lm.cli import main
from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.tokenizers.byte_bpe import _byte_symbols
from metaseq_lm.data.tokenizers.loading import load_tokenizer

END = "<|endoftext|>"
TEXTS = [
    "the cat sat\non the mat\n\nit was raining\n",
    "a second file\nhas no blank line at its end",
    "\nthird\n\nfile\n",
]


def write_megatron(prefix: Path, documents: list[list[list[int]]]) -> None:
    """Write documents of sequences of ids as Megatron-LM's IndexedDatasetBuilder does, as u16."""
    sequences = [ids for document in documents for ids in document]
    sizes = [len(ids) for ids in sequences]
    pointers = [0, *accumulate(2 * size for size in sizes)][:-1]
    ends = [0, *accumulate(map(len, documents))]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(sizes), len(ends))
    index += struct.pack(f"<{len(sizes)}i{len(sizes)}q{len(ends)}q", *sizes, *pointers, *ends)
    tokens = [token for ids in sequences for token in ids]
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))
    Path(f"{prefix}.idx").write_bytes(index)


def write_datatrove(path: Path, documents: list[list[int]], width: int) -> None:
    """Write documents of ids as datatrove's DocumentTokenizer does, `width` bytes each."""
    tokens = [token for ids in documents for token in ids]
    ends = list(accumulate(map(len, documents)))
    path.write_bytes(struct.pack(f"<{len(tokens)}{'H' if width == 2 else 'I'}", *tokens))
    Path(f"{path}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    Path(f"{path}.metadata").write_text(f"gpt2|{width}\n{len(tokens)}\n{len(tokens)} T")


def preprocess(folder: Path, paths: list[Path], *options: str) -> Path:
    assert (
        main(["preprocess", "--trainpref", *map(str, paths), "--destdir", str(folder), *options])
        == 0
    )
    return folder


def assert_same(one: Path, other: Path) -> None:
    """Compare all files but the manifests, which name the commands; of those the data."""
    names = {path.name for path in one.iterdir()}
    assert names == {path.name for path in other.iterdir()}
    for name in names - {"manifest.json"}:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert Manifest.load(one).data_hash == Manifest.load(other).data_hash


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"part{i}.txt" for i in range(len(TEXTS))]
    for path, text in zip(paths, TEXTS):
        path.write_text(text)
    preprocess(tmp_path / "tokenizer", paths, "--vocab-size", "400")
    return paths


@pytest.mark.parametrize("documents", ["lines", "blank"])
def test_merged_shards_are_one_corpus(tmp_path: Path, files: list[Path], documents: str) -> None:
    options = ["--tokenizer-from", str(tmp_path / "tokenizer"), "--documents", documents]
    one = preprocess(tmp_path / "one", files, *options)
    shards = [preprocess(tmp_path / "shards" / p.stem, [p], *options) for p in files]
    merged = tmp_path / "merged"
    assert main(["merge", *map(str, shards), "--destdir", str(merged)]) == 0
    assert_same(one, merged)
    counts, expected = (Manifest.load(folder).splits["train"] for folder in (merged, one))
    assert {**counts, "sources": 0} == {**expected, "sources": 0}


def test_shards_that_do_not_fit(
    tmp_path: Path, files: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    shard, merged = (
        preprocess(tmp_path / "a", files[:1], "--vocab-size", "300"),
        tmp_path / "merged",
    )
    folders = [str(tmp_path / "tokenizer"), str(shard)]
    assert main(["merge", *folders, "--destdir", str(merged)]) == 2
    assert "the same --tokenizer-from" in capsys.readouterr().err
    twice = [str(shard), str(shard / ".." / shard.name)]
    assert main(["merge", *twice, "--destdir", str(merged)]) == 2
    assert "given twice" in capsys.readouterr().err
    tokens = bytearray((shard / "train.bin").read_bytes())
    tokens[0] ^= 1
    (shard / "train.bin").write_bytes(tokens)
    assert main(["merge", str(shard), "--destdir", str(merged)]) == 1
    assert "is damaged" in capsys.readouterr().err
    assert main(["merge", str(tmp_path / "absent"), "--destdir", str(merged)]) == 2
    assert not merged.exists()


@pytest.mark.parametrize("form", ["megatron", "datatrove 2", "datatrove 4"])
def test_foreign_files_of_our_tokenizer_are_our_corpus(
    tmp_path: Path, files: list[Path], form: str
) -> None:
    text_data = tmp_path / "tokenizer"
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "tokenizer.json").write_bytes((text_data / "tokenizer.json").read_bytes())
    tokenizer = load_tokenizer(text_data)
    for path, text in zip(files, TEXTS):
        documents = tokenizer.encode_batch([line for line in text.split("\n") if line])
        if form == "megatron":
            write_megatron(foreign / path.stem, [[ids] for ids in documents])
        else:
            write_datatrove(foreign / f"{path.stem}.ds", documents, int(form[-1]))
    options = ["--trainpref", str(foreign), "--destdir", str(tmp_path / "imported")]
    assert main(["import-corpus", *options]) == 0
    (text_data / "train.words").unlink()  # which only a text tells
    assert_same(text_data, tmp_path / "imported")


def test_a_datatrove_corpus_trains_to_the_losses_of_the_text(
    tmp_path: Path, files: list[Path]
) -> None:
    text_data, foreign = tmp_path / "tokenizer", tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "tokenizer.json").write_bytes((text_data / "tokenizer.json").read_bytes())
    lines = [line for text in TEXTS for line in text.split("\n") if line]
    write_datatrove(foreign / "00000.ds", load_tokenizer(text_data).encode_batch(lines), 2)
    options = ["--trainpref", str(foreign), "--destdir", str(tmp_path / "imported")]
    assert main(["import-corpus", *options]) == 0
    losses = []
    for data in (text_data, tmp_path / "imported"):
        save = tmp_path / f"run_{data.name}"
        options = ["--save-dir", str(save), "--max-update", "3", *TINY, "trainer.valid_split=''"]
        rows = ["task.tokens_per_sample=8", "task.batch_size=4"]
        assert main(["train", str(data), *options, *rows]) == 0
        log = map(json.loads, (save / "log.jsonl").read_text().splitlines())
        losses.append([line["loss"] for line in log if line["kind"] == "train"])
    assert len(losses[0]) == 3 and losses[0] == losses[1]


def gpt2(folder: Path) -> tokenizers.Tokenizer:
    """Write a tokenizer.json as GPT-2's: bytes, a merge, and one special symbol."""
    symbols = {symbol: i for i, symbol in enumerate([*_byte_symbols(), "th"])}
    library = tokenizers.Tokenizer(models.BPE(symbols, [("t", "h")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([END])
    library.save(str(folder / "tokenizer.json"))
    return library


def test_a_tokenizer_without_mask(tmp_path: Path) -> None:
    """Its ids stay, special symbols come behind; sentences and the ends of documents too."""
    library = gpt2(tmp_path)
    end = library.token_to_id(END)
    sentences = [["the cat", "sat"], ["on the mat"]]
    ids = [[library.encode(s).ids for s in document] for document in sentences]
    for document in ids:
        document[-1].append(end)
    write_megatron(tmp_path / "corpus_text_sentence", [*ids, [[end]]])
    options = ["--trainpref", str(tmp_path / "corpus_text_sentence.bin"), "--strip", END]
    assert main(["import-corpus", *options, "--destdir", str(tmp_path / "data")]) == 0
    data, tokenizer = IndexedDataset(tmp_path / "data/train"), load_tokenizer(tmp_path / "data")
    assert [tokenizer.decode(data[i]) for i in range(3)] == ["the cat", "sat", "on the mat"]
    assert data.documents.tolist() == [0, 2, 3]
    assert tokenizer.vocabulary.symbols[: end + 1] == [*_byte_symbols(), "th", END]
    assert min(tokenizer.vocabulary.mask, tokenizer.vocabulary.pad) > end
    assert main(["doctor", str(tmp_path / "data"), "--verify"]) == 0


def test_a_pair_counts_once(tmp_path: Path) -> None:
    """NAME.* of a shell names both files of a pair."""
    gpt2(tmp_path)
    write_megatron(tmp_path / "corpus", [[[1, 2, 3]], [[4, 5]]])
    pair = [str(tmp_path / f"corpus.{suffix}") for suffix in ("bin", "idx")]
    assert main(["import-corpus", "--trainpref", *pair, "--destdir", str(tmp_path / "data")]) == 0
    assert IndexedDataset(tmp_path / "data/train").tokens.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("id", "token id 60000, but"),
        ("cut", "one is cut off"),
        ("index", "save_index=True"),
        ("tokenizer", "no tokenizer here"),
        ("json", "not a tokenizer"),
        ("strip", "--strip [EOT]: the tokenizer"),
        ("name", "no token files here"),
    ],
)
def test_what_cannot_be_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str, message: str
) -> None:
    gpt2(tmp_path)
    path = tmp_path / "00000.ds"
    write_datatrove(path, [[1, 2, 60000 if damage == "id" else 3]], 2)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    if damage == "index":
        Path(f"{path}.index").unlink()
    if damage == "tokenizer":
        (tmp_path / "tokenizer.json").unlink()
    if damage == "json":
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {}}))
    name = "absent" if damage == "name" else "00000"
    strip = ["--strip", "[EOT]"] if damage == "strip" else []
    options = ["--trainpref", str(tmp_path / name), *strip, "--destdir", str(tmp_path / "data")]
    assert main(["import-corpus", *options]) in (1, 2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "data").exists()
