"""Text to ids: the path of 'metaseq-lm preprocess' against encode_batch_fast of tokenizers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from text import lines
from timing import Figure, Step, Variant, paired, speed

from metaseq_lm.data.corpus.encode import encode_block
from metaseq_lm.data.records.text_files import TextFile
from metaseq_lm.data.tokenizers.byte_bpe import ByteBpe
from metaseq_lm.data.tokenizers.loading import load_tokenizer

VOCAB = 30000
TRAINED_ON = 4 << 20  # bytes of text that the tokenizer learns from
TARGET = 2.5


def our_encode(folder: Path, text: Path) -> Step:
    """Encode the blocks of a file with a tokenizer that has not encoded any text yet."""

    def step() -> dict[str, Any]:
        tokenizer = load_tokenizer(folder)
        found = [encode_block(tokenizer, block).values for block in TextFile(text).blocks()]
        return summary(text, found)

    return step


def library_encode(folder: Path, text: Path) -> Step:
    """Encode the same blocks with the library's own pipeline."""
    dtype = load_tokenizer(folder).dtype

    def step() -> dict[str, Any]:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        # The text has no special symbols; looking for them would cost time.
        tokenizer.encode_special_tokens = True
        found = []
        for block in TextFile(text).blocks():
            encoded = tokenizer.encode_batch_fast(block.texts, add_special_tokens=False)
            ids = [i for row in encoded for i in row.ids]
            found.append(np.fromiter(ids, dtype, len(ids)))
        return summary(text, found)

    return step


def summary(text: Path, found: list[np.ndarray]) -> dict[str, Any]:
    """Return megabytes of text, tokens, and a digest of all ids."""
    digest = hashlib.blake2b(digest_size=8)
    for ids in found:
        digest.update(np.ascontiguousarray(ids, "<u4").tobytes())
    tokens = sum(map(len, found))
    return {"amount": text.stat().st_size / 1e6, "tokens": tokens, "ids": digest.hexdigest()}


def prepare(folder: Path, given: Path | None, quick: bool) -> Path:
    """Write the text and a tokenizer trained on its beginning; return the text's path."""
    text = folder / "text.txt"
    if given is None:
        text.write_text("\n".join(lines(8 if quick else 48)) + "\n", encoding="utf-8")
    else:
        limit = 8_000_000 if quick else -1
        with given.open("rb") as file:
            content = file.read(limit)
        text.write_bytes(content[: content.rfind(b"\n") + 1])
    with text.open("rb") as file:
        sample = file.read(TRAINED_ON).decode("utf-8", "replace").split("\n")
    ByteBpe.train(sample, VOCAB).save(folder)
    return text


def figures(folder: Path, given: Path | None, quick: bool) -> Iterator[Figure]:
    """Yield megabytes per CPU second."""
    folder = folder / "preprocess"
    folder.mkdir()
    text = prepare(folder, given, quick)
    options = {"folder": folder, "text": text}
    variants = {"ours": Variant(our_encode, options), "library": Variant(library_encode, options)}
    done = paired(variants, rounds=3, warm_up=0 if not quick else 1)
    digests = {r["ids"] for measured in done.values() for r in measured.rounds}
    same = "ids equal" if len(digests) == 1 else "IDS DIFFER"
    first = done["ours"].rounds[0]
    what = given.name if given else "generated text"
    note = f"{what}, {first['amount']:.0f} MB, {first['tokens']} tokens, {same}; caches start empty"
    yield speed("preprocess", done["ours"], done["library"], "MB/s", TARGET, note)
