"""Checks of a corpus: its tokenizer and token files."""

from collections.abc import Iterator

import numpy as np

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.doctor.findings import (
    ERROR,
    WARNING,
    Finding,
    Subject,
    document_hashes,
    duplicates,
    overlaps,
    register_check,
    same_tokenizer,
    token_file,
    token_files,
    token_offsets,
    train_first,
)
from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.data.storage.manifest import CORPUS
from metaseq_lm.data.tokenizers.loading import load_tokenizer


@register_check(CORPUS)
def corpus(subject: Subject) -> Iterator[Finding]:
    """Yield the findings on the tokenizer and the token files of a corpus, train first."""
    folder, manifest = subject.folder, subject.manifest
    try:
        subject.tokenizer = load_tokenizer(folder)
    except MetaseqError as error:
        # Token files of another program come without a tokenizer; ours do not.
        yield Finding(WARNING if manifest is None else ERROR, str(error))
    else:
        expected = None if manifest is None else manifest.tokenizer["hash"]
        yield same_tokenizer(folder, subject.tokenizer, expected)
    names = token_files(folder) | set(subject.splits)
    if not names:
        yield Finding(ERROR, f"{folder}: no token files (.bin and .idx)")
    hashes: dict[str, np.ndarray] = {}
    for split in train_first(names):
        try:
            data = IndexedDataset(folder / split)
        except MetaseqError as error:
            yield Finding(ERROR, str(error))
            continue
        yield from token_file(data, subject.tokenizer)
        if data.dtype.kind in "iu":
            filled = np.diff(token_offsets(data, data.documents)) > 0
            hashes[split] = np.sort(document_hashes(data, data.documents)[filled])
            yield duplicates(str(folder / split), hashes[split])
    yield from overlaps(folder, hashes)
