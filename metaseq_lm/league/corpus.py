"""Facts about the corpus that the gates of a league need, kept next to its runs and in archives."""

import json
import math
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
from metaseq_lm.evaluation.suites import exact_scores
from metaseq_lm.reporting import archive

TOKEN, CLOZE = "token", "cloze"  # losses of a world, which criterions declare as bounds
ERRORS = 3.09  # standard errors that one normal value in 1,000 exceeds on one side
_FORM = {
    "vocabulary": COUNT,
    "unigram": AMOUNT,
    "trigram?": AMOUNT,
    "words?": COUNT,
    "valid?": {"divergence": FINITE, "usual": FINITE, "shared": FINITE, "passages?": FINITE},
    "shifted?": bool,
    "exact?": {
        **dict.fromkeys(("document", "token", "token_error", "cloze", "cloze_error"), AMOUNT),
        **dict.fromkeys(("documents", "longest"), COUNT),
    },
}


@dataclass(frozen=True)
class Exact:
    """The exact losses of the world of a corpus, in nats, see `worlds.measures.losses`.

    Attributes:
        document: Loss of a document, including its end.
        token: Loss of a token given the preceding ones.
        token_error: Its standard error.
        cloze: Loss of a token given all others in its document.
        cloze_error: Its standard error.
        documents: Number of documents in the valid split.
        longest: Number of tokens of the longest one.
    """

    document: float
    token: float
    token_error: float
    cloze: float
    cloze_error: float
    documents: int
    longest: int

    def least(self, kind: str, room: int, used: int) -> float:
        """Return the least possible loss, less an error that one in 1,000 exceeds.

        Args:
            kind: TOKEN, whose targets include the [SEP] of each row, or CLOZE.
            room: Tokens of a row, special ones excluded; longer documents take several rows.
            used: Number of documents of the valid split that are scored.
        """
        mean, error = self.cloze, self.cloze_error
        if kind == TOKEN:
            tokens = self.document / self.token
            rows = 1 if self.longest <= room else 1 + tokens / room
            mean, error = self.document / (tokens + rows), self.token_error
        return mean - ERRORS * error * math.sqrt(1 + self.documents / used)


@dataclass(frozen=True)
class CorpusFacts:
    """Facts about a corpus.

    Attributes:
        vocabulary: The number of symbols, V. A uniform guess has a cross-entropy of ln V.
        unigram: The cross-entropy of the valid split under the counts of the train split, in nats a
            token: the best loss of a model that ignores context.
        trigram: The same under the trigrams of train, see `NGram`, which a causal language model
            has to beat; None in archives of earlier versions.
        words: Number of words in the train split; None if its manifest lacks it.
        valid: Comparison of the valid split with train; None in archives of earlier versions.
        shifted: Whether valid is meant to be of another domain.
        exact: The losses of its world; None for other corpora and in archives of earlier versions.
    """

    vocabulary: int
    unigram: float
    trigram: float | None = None
    words: int | None = None
    valid: Likeness | None = None
    shifted: bool = False
    exact: Exact | None = None

    def as_text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @property
    def rounded(self) -> Any:
        """What is the same on other processors and with other versions, whose last bits differ."""
        return json.loads(self.as_text(), parse_float=lambda number: f"{float(number):.9g}")


def from_about(path: Path, about: Mapping[str, str]) -> CorpusFacts | None:
    """Return the corpus that the archive at `path` describes; None if it describes none.

    Raises MetaseqError if that is damaged.
    """
    if "corpus" in about:
        values = _known(CorpusFacts, archive.read_fact(path, about, "corpus", _FORM, ""))
        if "valid" in values:
            values["valid"] = Likeness(**_known(Likeness, values["valid"]))
        if "exact" in values:
            values["exact"] = Exact(**_known(Exact, values["exact"]))
        return CorpusFacts(**values)
    if "unigram" in about:  # an archive of earlier versions
        vocabulary = archive.read_fact(path, about, "vocabulary", COUNT, "null")
        return CorpusFacts(vocabulary, archive.read_fact(path, about, "unigram", AMOUNT, ""))
    return None


def _known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are fields of a dataclass and not null."""
    names = (item.name for item in fields(kind))
    return {name: values[name] for name in names if values.get(name) is not None}


def read_corpus(data: Path, shifted: bool = False) -> CorpusFacts:
    """Return the facts about the corpus in a data folder.

    The unigram's cross-entropy adds one to each symbol's count, so that a symbol that is absent
    from train does not have an infinite loss. Special symbols are never targets and do not count.

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
    # Of large splits only some sequences: of train for counts, of valid for scores.
    tokens, sizes = sequences_of(valid)
    log_probs = NGram(*sequences_of(train), len(vocabulary)).token_log_probs(tokens, sizes)
    losses = -log_probs[is_text[tokens.clip(0, len(vocabulary) - 1)]]
    exact, known = None, exact_scores(data, "losses")
    if known and len(valid):
        token, cloze = known[TOKEN], known[CLOZE]
        errors = token["mean"], token["error"], cloze["mean"], cloze["error"]
        exact = Exact(known["document"]["mean"], *errors, len(valid), int(valid.sizes.max()))
    return CorpusFacts(
        len(vocabulary),
        float(-(counted @ log_shares) / max(counted.sum(), 1)),
        float(losses.mean()) if len(losses) else 0.0,
        train_words(data),
        compare(train, valid, vocabulary),
        shifted,
        exact,
    )


def check_domain(corpus: CorpusFacts, data: Path) -> None:
    """Raise UsageError, before anything runs, if valid is of another domain than train."""
    valid = corpus.valid
    if valid is not None and valid.shift > FOREIGN and not corpus.shifted:
        raise UsageError(
            f"{data}: valid comes from another domain than train: its token frequencies diverge "
            f"by {valid.divergence:.3f} nats, those of documents drawn from train by "
            f"{valid.usual:.3f}. Rates would be chosen, and losses compared, on text that no run "
            "sees. Hold out documents from everywhere in the text, or write shifted_valid: true "
            "among the controls of the plan"
        )
