"""Documents packed into rows: each once an epoch, whole, and as if it had a row of its own."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from metaseq_lm.config.criterions import MaskedDiffusionConfig
from metaseq_lm.config.tasks import DOCUMENTS
from metaseq_lm.core import random_streams
from metaseq_lm.core.batch import Layout, TokenBatch
from metaseq_lm.core.config import section
from metaseq_lm.criterions import Criterion
from metaseq_lm.criterions.language_modeling import CausalLM
from metaseq_lm.criterions.predictions import MaskedDiffusion, MaskedNextToken, PrefixLM
from metaseq_lm.data.corpus.documents import PackedDocuments, _best_fit
from metaseq_lm.data.corpus.masking import Masking
from metaseq_lm.data.corpus.packing import open_corpus
from metaseq_lm.data.corpus.predictions import (
    MaskNoise,
    PredictionBatch,
    denoising_batch,
    next_token_batch,
    prefix_batch,
)
from metaseq_lm.data.corpus.rows import Corpus, masked_batch
from metaseq_lm.data.storage.indexed import IndexedWriter
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary, special_symbols
from metaseq_lm.models.transformer.encoder import ModernLM, TransformerLM
from metaseq_lm.tasks.language_modeling import _language_batch

VOCABULARY = Vocabulary([*special_symbols(1), *(f"w{i}" for i in range(4, 900))])
PAD, SEP, CLS = VOCABULARY.pad, VOCABULARY.sep, VOCABULARY.cls(0)
FIRST, LENGTH = len(special_symbols(1)) + 1, 14
SIZES = [3, 9, 2, 12, 5, 1, 30, 4, 7, 2, 3, 12, 8, 1, 6, 2]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(20, 40))
def test_best_fit_fills_rows_and_opens_none_in_vain(sizes, capacity):
    rows = _best_fit(np.array(sizes), capacity)
    filled = np.bincount(rows, sizes)
    assert set(rows) == set(range(len(filled)))
    assert filled.max() <= capacity
    # The piece that opened the last row, its largest, has room in no other row.
    largest = max(size for size, row in zip(sizes, rows) if row == len(filled) - 1)
    assert (filled[:-1] + largest > capacity).all()


def write(folder: Path, sizes: list[int], name: str = "train") -> list[list[int]]:
    """Write documents of two sentences each, whose tokens count up; return their tokens."""
    token, documents = FIRST, []
    with IndexedWriter(folder / name, np.uint16, documents=True) as writer:
        for size in sizes:
            documents.append(list(range(token, token + size)))
            token += size
            writer.add(np.array(documents[-1][: size // 2], np.uint16))
            writer.add(np.array(documents[-1][size // 2 :], np.uint16))
            writer.end_documents([len(writer)])
    return documents


def pieces_of(packed: PackedDocuments, samples: np.ndarray) -> list[list[int]]:
    """Return the documents of rows, taken apart by the numbers of their tokens' documents."""
    rows, lengths = packed.rows(samples)
    numbers = packed.documents(samples, rows.shape[1])
    pieces = []
    for row, length, number in zip(rows, lengths, numbers):
        assert (row[length:] == PAD).all()
        for document in range(number[length - 1] + 1):
            piece = row[:length][number[:length] == document]
            assert piece[0] == CLS and piece[-1] == SEP
            pieces.append(piece[1:-1].tolist())
    return pieces


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_an_epoch_shows_each_document_once_and_whole(epoch, tmp_path):
    """But for one that is longer than a row: it is cut."""
    documents = write(tmp_path, SIZES)
    packed = PackedDocuments(tmp_path, "train", VOCABULARY, LENGTH, seed=1)
    samples = np.arange(len(packed)) + epoch * len(packed)
    room = LENGTH - 2
    cut = [d[at : at + room] for d in documents for at in range(0, len(d), room)]
    assert sorted(pieces_of(packed, samples)) == sorted(cut)
    rows, lengths = packed.rows(samples)
    assert np.array_equal(lengths, packed.row_lengths[samples]) and lengths.max() <= LENGTH
    assert len(packed) <= 1 + sum(len(d) + 2 for d in cut) // (LENGTH - 3)


def test_neighbours_change_by_epoch_and_seed(tmp_path):
    write(tmp_path, SIZES * 3)
    packed, other = (
        PackedDocuments(tmp_path, "train", VOCABULARY, LENGTH, seed=seed) for seed in (1, 2)
    )
    count = len(packed)
    epochs = [packed.rows(np.arange(count) + e * count)[0] for e in range(3)]
    assert not any(np.array_equal(epochs[i], epochs[j]) for i, j in ((0, 1), (1, 2)))
    assert np.array_equal(epochs[0], other.rows(np.arange(count))[0])
    assert not np.array_equal(epochs[1], other.rows(np.arange(count) + count)[0])
    mixed = np.array([3, count + 1, 2 * count])  # a batch may have rows of several epochs
    alone = [packed.rows(np.array([sample]))[0][0] for sample in mixed]
    for row, expected in zip(packed.rows(mixed)[0], alone):
        assert np.array_equal(row[: len(expected)], expected)


def test_rows_are_cut_to_a_width(tmp_path):
    write(tmp_path, SIZES)
    packed = PackedDocuments(tmp_path, "train", VOCABULARY, LENGTH, seed=1)
    samples = np.arange(len(packed))
    rows, lengths = packed.rows(samples, width=6)
    whole, _ = packed.rows(samples)
    assert np.array_equal(rows, whole[:, :6]) and lengths.max() == 6
    assert np.array_equal(packed.documents(samples, 6), packed.documents(samples, LENGTH)[:, :6])


@pytest.mark.parametrize("name", ["modern", "transformer"])
def test_the_causal_loss_is_that_of_rows_of_their_own(name, tmp_path):
    """No token sees another document, positions begin anew, and no target crosses an end."""
    sizes = [size for size in SIZES if size <= LENGTH - 2]
    write(tmp_path, sizes)
    options = SimpleNamespace(
        sample_break_mode=DOCUMENTS, tokens_per_sample=LENGTH, shuffle_tokens=False
    )
    packed = open_corpus(tmp_path, "train", VOCABULARY, options, seed=1)
    with IndexedWriter(tmp_path / "lines", np.uint16) as writer:
        token = FIRST
        for size in sizes:
            writer.add(np.arange(token, token + size).astype(np.uint16))
            token += size
    lines = Corpus(tmp_path, "lines", VOCABULARY, LENGTH, "eos")
    model = model_of(name)
    sums, counts = [], []
    for corpus in (packed, lines):
        batch = _language_batch(corpus, np.arange(len(corpus)))
        term = CausalLM()(model, batch)["next_token"]
        sums.append(term.sum.item())
        counts.append(batch.sizes["targets"])
    assert len(packed) < len(lines)
    assert counts[0] == counts[1] == sum(sizes) + len(sizes)
    assert sums[0] == pytest.approx(sums[1], rel=1e-12)
    batch = _language_batch(packed, np.arange(len(packed)))
    leaking = batch.replace(layout=replace(batch.layout, documents=None))
    assert CausalLM()(model, leaking)["next_token"].sum.item() != pytest.approx(sums[0], rel=1e-6)


SPECIALS = np.asarray(VOCABULARY.specials)
MASKING = Masking(
    VOCABULARY.mask, 0.4, 0.0, 0.0, np.setdiff1d(np.arange(len(VOCABULARY)), SPECIALS), SPECIALS
)
BATCHES: dict[str, tuple[Criterion, Callable[..., PredictionBatch]]] = {
    "prefix_lm": (PrefixLM(), prefix_batch),
    "masked_next_token": (MaskedNextToken(), partial(next_token_batch, masking=MASKING)),
    "masked_diffusion": (
        MaskedDiffusion(MaskedDiffusionConfig(shifted=True)),
        partial(denoising_batch, masking=MASKING, noise=MaskNoise(is_shifted=True)),
    ),
}


def alone(batch: PredictionBatch, row: int, document: int, lengths: np.ndarray) -> PredictionBatch:
    """Return the part of a batch that is one document, in a row of its own."""
    layout, width = batch.layout, batch.tokens.shape[1]
    assert layout.documents is not None
    inside = (layout.documents[row] == document) & (torch.arange(width) < int(lengths[row]))
    at = torch.flatten(inside.nonzero())
    chosen = (batch.sources // width == row) & inside[batch.sources % width] & (batch.targets >= 0)
    prefix = None if layout.prefix is None else layout.prefix[row, at[:1]]
    return batch.replace(
        tokens=batch.tokens[[row]][:, at],
        layout=Layout(reach=layout.reach, prefix=prefix),
        sources=batch.sources[chosen] % width - at[0],
        targets=batch.targets[chosen],
        weights=None if batch.weights is None else batch.weights[chosen],
    )


@pytest.mark.parametrize("task", BATCHES)
@pytest.mark.parametrize("name", ["modern", "transformer"])
def test_predictions_in_packed_rows_are_those_of_documents_alone(name, task, tmp_path):
    """Each document as if nothing were beside it."""
    write(tmp_path, SIZES)
    packed = PackedDocuments(tmp_path, "train", VOCABULARY, LENGTH, seed=1)
    samples = np.arange(len(packed))
    keys = random_streams.row_keys(1, samples)
    times = (samples + 0.5) / len(samples)
    criterion, build = BATCHES[task]
    drawn = {} if task == "masked_next_token" else {"times": times}
    batch = build(packed, samples=samples, keys=keys, **drawn)
    assert batch.layout.documents is not None
    lengths, model = packed.row_lengths[samples], model_of(name)
    together = criterion(model, batch)
    sums = dict.fromkeys(together, 0.0)
    targets = 0
    for row in range(len(samples)):
        for document in range(int(batch.layout.documents[row, lengths[row] - 1]) + 1):
            part = alone(batch, row, document, lengths)
            targets += len(part.targets)
            assert (part.sources >= 0).all() and (part.sources < part.tokens.shape[1]).all()
            for key, term in criterion(model, part).items():
                sums[key] += term.sum.item()
    assert targets == batch.sizes["targets"] > 0  # no target is that of another document
    for key, term in together.items():
        assert term.sum.item() == pytest.approx(sums[key], rel=1e-12), key


def test_each_document_has_a_prefix_of_its_own(tmp_path):
    """Of 1 to n - 1 of its n tokens, alike likely; the first of a row has that of the row alone."""
    sizes = [3, 5, 2] * 4
    write(tmp_path, sizes)
    packed = PackedDocuments(tmp_path, "train", VOCABULARY, LENGTH * 3, seed=1)
    samples, counts = np.arange(len(packed)), {size + 2: np.zeros(size + 1) for size in sizes}
    for draw in range(400):
        times = 1 - random_streams.uniforms(random_streams.row_keys(draw, samples), 0, 1)[:, 0]
        keys = random_streams.row_keys(1000 + draw, samples)
        layout = prefix_batch(packed, samples, keys, 0, times).layout
        assert layout.prefix is not None and layout.documents is not None
        prefix, documents = layout.prefix.numpy(), layout.documents.numpy()
        for row in samples[:, None]:  # however the batch is cut
            one = prefix_batch(packed, row, keys[row], prefix.shape[1], times[row]).layout
            assert one.prefix is not None and np.array_equal(one.prefix, prefix[row])
        for row, length in enumerate(packed.row_lengths[samples]):
            for document in range(documents[row, length - 1] + 1):
                inside = np.flatnonzero(documents[row, :length] == document)
                (value,) = set(prefix[row, inside])
                counts[len(inside)][value - 1] += 1
                if not document:
                    assert value == 1 + int((1 - times[row]) * (len(inside) - 1))
    for count in counts.values():
        assert stats.chisquare(count).pvalue > 1e-3


def model_of(name: str) -> torch.nn.Module:
    torch.manual_seed(4)
    sizes = {"encoder_layers": 2, "encoder_embed_dim": 8, "encoder_ffn_embed_dim": 12}
    config = section("model", _name=name, **sizes, encoder_attention_heads=2)
    classes = {"modern": ModernLM, "transformer": TransformerLM}
    return classes[name](config, len(VOCABULARY)).double().eval()


def test_masked_rows_have_the_documents_in_their_layout(tmp_path):
    write(tmp_path, SIZES)
    packed = PackedDocuments(tmp_path, "train", VOCABULARY, LENGTH, seed=1)
    specials = np.asarray(VOCABULARY.specials)
    words = np.setdiff1d(np.arange(len(VOCABULARY)), specials)
    masking = Masking(VOCABULARY.mask, 0.5, 0.0, 0.0, words, specials)
    collate = partial(masked_batch, packed, masking)
    samples = np.arange(len(packed))
    batch: TokenBatch = collate(samples, np.arange(len(packed), dtype=np.uint64))
    documents = packed.documents(samples, batch.tokens.shape[1])
    assert np.array_equal(batch.layout.documents, documents)
    hidden = batch.tokens == VOCABULARY.mask
    assert hidden.sum() == batch.sizes["targets"] > 0
    assert not hidden[:, 0].any()
