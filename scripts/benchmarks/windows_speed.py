"""Windows of a binarised corpus with masks, against DataLoader and transformers' collator."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from metaseq_lm.data.corpus import Corpus, masked_batch
from metaseq_lm.data.indexed import IndexedWriter
from metaseq_lm.data.masking import Masking
from metaseq_lm.data.streams import Shard, Shuffled, Stream
from metaseq_lm.data.vocabulary import Vocabulary, special_symbols
from timing import Figure, Step, Variant, paired, speed

VOCAB, ROWS, LENGTH, TOKENS = 30000, 32, 128, 4_000_000
TARGET = 50.0


def make_corpus(folder: Path) -> Path:
    """Write random tokens as one document and their vocabulary; return the folder."""
    folder = folder / "windows"
    folder.mkdir()
    specials = special_symbols()
    Vocabulary([*specials, *(f"w{i}" for i in range(VOCAB - len(specials)))]).save(
        folder / "dict.txt"
    )
    with IndexedWriter(folder / "train", "<u2") as writer:
        writer.add(np.random.default_rng(1).integers(len(specials), VOCAB, TOKENS, dtype="<u2"))
    return folder


def our_batches(folder: Path, batches: int) -> Step:
    """Make batches with our stream."""
    vocabulary = Vocabulary.load(folder / "dict.txt")
    corpus = Corpus(folder, "train", vocabulary, LENGTH, "none")
    specials = np.asarray(vocabulary.specials)
    words = np.setdiff1d(np.arange(VOCAB), specials)
    how = Masking(mask=vocabulary.mask, replacements=words, spared=specials)
    order = Shuffled(len(corpus), ROWS, 1, "train")
    stream = Stream("train", order, partial(masked_batch, corpus, how), 1)
    shard = Shard()
    number = 0

    def step() -> dict[str, Any]:
        nonlocal number
        share = 0.0
        for number in range(number, number + batches):
            (batch,) = stream.micro_batches(number, shard)
            share += batch["sizes"]["targets"] / batch["tokens"].numel()
        return {"amount": batches * ROWS, "share": share / batches}

    return step


class Windows(Dataset):
    """The same windows one by one, in the form that the collator's documentation recommends."""

    def __init__(self, folder: Path) -> None:
        self.vocabulary = Vocabulary.load(folder / "dict.txt")
        self.tokens = np.memmap(folder / "train.bin", "<u2", "r")
        self.special = [1] + [0] * (LENGTH - 2) + [1]

    def __len__(self) -> int:
        return TOKENS // (LENGTH - 2)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        at = index * (LENGTH - 2)
        words = self.tokens[at : at + LENGTH - 2].tolist()
        row = [self.vocabulary.cls(), *words, self.vocabulary.sep]
        return {"input_ids": row, "special_tokens_mask": self.special}


def loader_batches(folder: Path, batches: int) -> Step:
    """Make batches with a DataLoader in this process."""
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    windows = Windows(folder)
    ids = {symbol: i for i, symbol in enumerate(windows.vocabulary.symbols)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(ids, unk_token="[PAD]")),
        pad_token="[PAD]",
        mask_token="[MASK]",
        cls_token="[CLS0]",
        sep_token="[SEP]",
    )
    collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    torch.manual_seed(1)
    loader = DataLoader(windows, ROWS, shuffle=True, collate_fn=collate, num_workers=0)
    source = iter(loader)

    def step() -> dict[str, Any]:
        nonlocal source
        share = 0.0
        for _ in range(batches):
            batch = next(source, None)
            if batch is None:
                source = iter(loader)
                batch = next(source)
            share += float((batch["labels"] >= 0).float().mean())
        return {"amount": batches * ROWS, "share": share / batches}

    return step


def figures(folder: Path, given: Optional[Path], quick: bool) -> Iterator[Figure]:
    """Yield windows per second."""
    folder = make_corpus(folder)
    variants = {
        "ours": Variant(our_batches, {"folder": folder, "batches": 200 if quick else 1000}),
        "loader": Variant(loader_batches, {"folder": folder, "batches": 10 if quick else 100}),
    }
    done = paired(variants, rounds=5)
    shares = (done[name].rounds[0]["share"] for name in variants)
    note = f"{ROWS} x {LENGTH}; share of tokens that are targets: " + ", ".join(
        f"{share:.3f}" for share in shares
    )
    yield speed("windows", done["ours"], done["loader"], "windows/s", TARGET, note)
