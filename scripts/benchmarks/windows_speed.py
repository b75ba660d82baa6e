"""Windows of a binarised corpus with masks, against DataLoader and transformers' collator."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import Figure, Step, Variant, paired, speed
from torch.utils.data import DataLoader, Dataset
from training import made_up_corpus

from metaseq_lm.data.corpus.masking import Masking
from metaseq_lm.data.corpus.rows import Corpus, masked_batch
from metaseq_lm.data.streams import Shard, Shuffled, Stream
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary

VOCAB, ROWS, LENGTH, WINDOWS = 30000, 32, 128, 32_000
TARGET = 50.0


def our_batches(folder: Path, batches: int) -> Step:
    """Make batches with our stream."""
    vocabulary = Vocabulary.load(folder / "dict.txt")
    corpus = Corpus(folder, "train", vocabulary, LENGTH, "none")
    specials = np.asarray(vocabulary.specials)
    words = np.setdiff1d(np.arange(VOCAB), specials)
    how = Masking(mask=vocabulary.mask, replacements=words, spared=specials)
    order = Shuffled(len(corpus), ROWS, 1, "train")
    stream = Stream("train", order, partial(masked_batch, corpus, how), 1, corpus.row_lengths)
    shard = Shard()
    number = 0

    def step() -> dict[str, Any]:
        nonlocal number
        share = 0.0
        for update in range(number, number + batches):
            (batch,) = stream.micro_batches(update, shard)
            share += batch.sizes["targets"] / batch.tokens.numel()
        number += batches
        return {"amount": batches * ROWS, "share": share / batches}

    return step


class Rows(Dataset):
    """The same windows one by one, as dicts of lists like in data sets, or as bare tensors.

    The dicts hold the mask of special tokens that the collator's documentation recommends.
    """

    def __init__(self, folder: Path, bare: bool) -> None:
        self.vocabulary = Vocabulary.load(folder / "dict.txt")
        self.tokens = np.memmap(folder / "train.bin", "<u2", "r")
        self.special = [1] + [0] * (LENGTH - 2) + [1]
        self.bare = bare

    def __len__(self) -> int:
        return WINDOWS

    def __getitem__(self, index: int) -> Any:
        words = self.tokens[index * (LENGTH - 2) : (index + 1) * (LENGTH - 2)]
        if self.bare:
            row = np.empty(LENGTH, np.int64)
            row[0], row[1:-1], row[-1] = self.vocabulary.cls(), words, self.vocabulary.sep
            return torch.from_numpy(row)
        ids = [self.vocabulary.cls(), *words.tolist(), self.vocabulary.sep]
        return {"input_ids": ids, "special_tokens_mask": self.special}


def loader_batches(folder: Path, batches: int, bare: bool) -> Step:
    """Make batches with a DataLoader in this process."""
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    windows = Rows(folder, bare)
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


def figures(folder: Path, given: Path | None, quick: bool) -> Iterator[Figure]:
    """Yield windows per second."""
    folder = made_up_corpus(folder / "windows", VOCAB, WINDOWS * (LENGTH - 2))
    variants = {
        "ours": Variant(our_batches, {"folder": folder, "batches": 200 if quick else 1000}),
    }
    for name, bare in (("loader", False), ("loader_bare", True)):
        options = {"folder": folder, "batches": 20 if quick else 100, "bare": bare}
        variants[name] = Variant(loader_batches, options)
    done = paired(variants, rounds=5)
    shares = ", ".join(f"{done[name].rounds[0]['share']:.3f}" for name in variants)
    note = f"{ROWS} x {LENGTH}; share of tokens that are targets: {shares}"
    yield speed("windows", done["ours"], done["loader"], "windows/s", TARGET, note)
    note = "the reference collates bare tensors, its quickest form"
    yield speed("windows_bare", done["ours"], done["loader_bare"], "windows/s", None, note)
