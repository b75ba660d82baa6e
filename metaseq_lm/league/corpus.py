"""What the gates of a league need to know of its corpus, kept beside its runs and in archives."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.files import AMOUNT, COUNT, FINITE
from metaseq_lm.data.doctor.likeness import FOREIGN, Likeness, compare, token_counts
from metaseq_lm.data.ngrams import NGram, sequences_of
from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.data.storage.manifest import train_words
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.reporting import archive

FORM = {
    "vocabulary": COUNT,
    "unigram": AMOUNT,
    "trigram?": AMOUNT,
    "words?": COUNT,
    "valid?": {"divergence": FINITE, "usual": FINITE, "shared": FINITE, "passages?": FINITE},
    "shifted?": bool,
}


@dataclass(frozen=True)
class Corpus:
    """What is known of a corpus.

    Attributes:
        vocabulary: The number of symbols, V. A uniform guess has a cross-entropy of ln V.
        unigram: The cross-entropy of the valid split under the counts of the train split, in nats a
            token: what a model can reach that ignores context.
        trigram: The same under the trigrams of train, see `NGram`: what a causal language model has
            to beat; None in archives of earlier versions.
        words: The words of the train split; None if its manifest does not say.
        valid: How the valid split compares with train; None in archives of earlier versions.
        shifted: Whether that is meant to be of another domain.
    """

    vocabulary: int
    unigram: float
    trigram: float | None = None
    words: int | None = None
    valid: Likeness | None = None
    shifted: bool = False

    def as_text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))


def from_about(path: Path, about: Mapping[str, str]) -> Corpus | None:
    """Return what the archive at `path` says of the corpus; None if it does not.

    Raises MetaseqError if that is damaged.
    """
    if "corpus" in about:
        values = _known(Corpus, archive.read_fact(path, about, "corpus", FORM, ""))
        if "valid" in values:
            values["valid"] = Likeness(**_known(Likeness, values["valid"]))
        return Corpus(**values)
    if "unigram" in about:  # an archive of earlier versions
        vocabulary = archive.read_fact(path, about, "vocabulary", COUNT, "null")
        return Corpus(vocabulary, archive.read_fact(path, about, "unigram", AMOUNT, ""))
    return None


def _known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the fields of a dataclass, without null."""
    names = (item.name for item in fields(kind))
    return {name: values[name] for name in names if values.get(name) is not None}


def read_corpus(data: Path, shifted: bool = False) -> Corpus:
    """Return what there is to know of a data folder of a corpus.

    In the unigram's cross-entropy one is added to each symbol's count, so that a symbol that
    training does not have costs no infinite loss. Special symbols are no targets: they do not
    count.

    Args:
        data: The folder, with `dict.txt` and the token files of train and valid.
        shifted: Whether valid is meant to be of another domain.

    Raises:
        MetaseqError: A file is missing or damaged.
    """
    vocabulary = Vocabulary.load(data / "dict.txt")
    train, valid = (IndexedDataset(data / name) for name in ("train", "valid"))
    is_text = ~np.isin(np.arange(len(vocabulary)), vocabulary.specials)
    seen, other = (token_counts(split, len(vocabulary)) for split in (train, valid))
    log_shares = np.log((seen + 1) / (seen + 1)[is_text].sum())
    counted = other * is_text
    return Corpus(
        len(vocabulary),
        float(-(counted @ log_shares) / max(counted.sum(), 1)),
        trigram_loss(train, valid, is_text),
        train_words(data),
        compare(train, valid, vocabulary),
        shifted,
    )


def trigram_loss(train: IndexedDataset, valid: IndexedDataset, is_text: np.ndarray) -> float:
    """Return the cross-entropy of valid under the trigrams of train, in nats a token.

    Args:
        train: The split whose trigrams are counted, those of some sequences if it is large.
        valid: The other split, of which as many tokens at most are scored.
        is_text: Which symbols count, bool (V,).
    """
    ngram = NGram(*sequences_of(train), len(is_text))
    tokens, sizes = sequences_of(valid)
    is_target = is_text[tokens.clip(0, len(is_text) - 1)]
    losses = -ngram.token_log_probs(tokens, sizes)[is_target]
    return float(losses.mean()) if len(losses) else 0.0


def check_domain(corpus: Corpus, data: Path) -> None:
    """Raise UsageError, before anything runs, if valid is of another domain than train."""
    valid = corpus.valid
    if valid is not None and valid.shift > FOREIGN and not corpus.shifted:
        raise UsageError(
            f"{data}: valid is of another domain than train: its token frequencies diverge by "
            f"{valid.divergence:.3f} nats, those of documents drawn from train by "
            f"{valid.usual:.3f}. Rates would be chosen, and losses compared, on text that no run "
            "sees. Hold out documents from everywhere in the text, or write shifted_valid: true "
            "among the controls of the plan"
        )
