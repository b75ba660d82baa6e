"""N-best lists of a speech recogniser or translator: files, word error rates, re-ranking.

Lists are JSON, `{utterance: {"ref": text, "hyp_1": {"score": number, "text": text}, ...}}`; scores
are log-probabilities. Pseudo-log-likelihoods (PLLs) are lines `pll<TAB>tokens<TAB>text`. Lists are
re-ranked by score + lambda * PLL (Salazar et al. 2020): the score is not scaled, lengths are not
normalised, and a development set chooses lambda. Words are separated by white space.

Shapes: H hypotheses of an utterance, U utterances.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.output import escape_formula
from metaseq_lm.core.random_streams import generator
from metaseq_lm.data.records.json_files import json_object
from metaseq_lm.data.records.record import Record
from metaseq_lm.data.records.text_files import BLOCK, TextFile

_REFERENCE = "ref"
_HYPOTHESIS = re.compile(r"hyp_(\d{1,9})")
DRAWS = 1000  # bootstrap samples


@dataclass(frozen=True, eq=False)
class NBest:
    """The hypotheses of one utterance in the order of their numbers: H texts and scores (H,)."""

    utterance: str
    reference: str
    texts: list[str]
    scores: np.ndarray

    @cached_property
    def edits(self) -> np.ndarray:
        """The word edits from the reference to each hypothesis, int64 (H,)."""
        return _edit_distances(self.reference, self.texts)

    @property
    def words(self) -> int:
        """The number of words of the reference."""
        return len(self.reference.split())


def read_nbest(path: Path) -> list[NBest]:
    """Return the lists of a file, with the white space of texts normalised as in `_one_line`.

    MetaseqError with file and utterance for anything that is not such a list.
    """
    content = b"".join(TextFile(path).chunks(BLOCK))
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MetaseqError(f"{path}: not valid UTF-8 (byte {error.start})") from error
    utterances = json_object(text, str(path))
    if not utterances:
        raise MetaseqError(f"{path}: holds no utterance")
    lists = [_utterance(name, fields, path) for name, fields in utterances.items()]
    if not any(nbest.words for nbest in lists):
        raise MetaseqError(f"{path}: the references hold no word")
    return lists


def _utterance(name: str, fields: Any, path: Path) -> NBest:
    where = f"{path}: utterance {name!r}"
    if not isinstance(fields, dict):
        raise MetaseqError(f"{where}: not a JSON object but {json.dumps(fields)[:60]}")
    hypotheses = []
    for key, hypothesis in fields.items():
        if key == _REFERENCE:
            continue
        number = _HYPOTHESIS.fullmatch(key)
        if number is None:
            raise MetaseqError(f"{where}: {key!r} is neither 'ref' nor 'hyp_' and a number")
        if not isinstance(hypothesis, dict):
            raise MetaseqError(f"{where}: {key}: expected score and text in a JSON object")
        text = _one_line(Record(hypothesis, f"{where}: {key}").text("text"))
        hypotheses.append((int(number[1]), text, _score(hypothesis, f"{where}: {key}")))
    reference = _one_line(Record(fields, where).text(_REFERENCE))
    if not hypotheses:
        raise MetaseqError(f"{where}: has no hypothesis (hyp_1, hyp_2, ...)")
    _, texts, scores = zip(*sorted(hypotheses, key=lambda item: item[0]))
    return NBest(name, reference, list(texts), np.array(scores))


def _score(hypothesis: dict[str, Any], where: str) -> float:
    value = hypothesis.get("score")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise MetaseqError(f"{where}: its score is {json.dumps(value)[:60]}, not a number")
    # This also catches NaN; a JSON number may be too large for a float.
    if not abs(value) <= 1e300:
        raise MetaseqError(f"{where}: its score is {str(value)[:60]}, not a finite number")
    return float(value)


def _one_line(text: str) -> str:
    """Return `text` with one space between words, so that equal texts are scored once."""
    return " ".join(text.split())


def write_nbest(lists: Sequence[NBest], scores: Sequence[np.ndarray]) -> bytes:
    """Return the file of `lists` with other scores, (H,) each, the best hypothesis first."""
    content: dict[str, Any] = {}
    for nbest, new_scores in zip(lists, scores):
        entry = content[nbest.utterance] = {_REFERENCE: nbest.reference}
        for rank, i in enumerate(np.argsort(-new_scores, kind="stable"), 1):
            entry[f"hyp_{rank}"] = {"score": float(new_scores[i]), "text": nbest.texts[i]}
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def score_lines(rows: Iterable[tuple[float, int, str]]) -> bytes:
    """Return the lines `pll<TAB>tokens<TAB>text`; numbers are read back as the same floats."""
    # Spreadsheets open such files, so `escape_formula` escapes texts.
    return "".join(
        f"{pll!r}\t{tokens}\t{escape_formula(text)}\n" for pll, tokens, text in rows
    ).encode()


def read_plls(path: Path) -> dict[str, float]:
    """Return the PLL of each text in a file of `score_lines`; MetaseqError names a wrong line."""
    plls = {}
    for number, line, _ in TextFile(path, "fail").lines():
        fields = line.split("\t", 2)
        try:
            value = float(fields[0])
        except ValueError:
            value = math.nan
        if len(fields) != 3 or not math.isfinite(value):
            raise MetaseqError(
                f"{path}:{number}: expected 'pll<TAB>tokens<TAB>text', found {line[:60]!r}"
            )
        plls[escape_formula(fields[2])] = value
    return plls


# ---------------------------------------------------------------- word errors and re-ranking


def _edit_distances(reference: str, hypotheses: Sequence[str]) -> np.ndarray:
    """Return the word edit distance of the reference to each hypothesis, int64 (H,)."""
    target = reference.split()
    words = [hypothesis.split() for hypothesis in hypotheses]
    longest = max(map(len, words), default=0)
    ids = {word: number for number, word in enumerate(dict.fromkeys(target))}
    # -1 is a word not in the reference, or padding; neither can match.
    table = np.full((len(words), longest), -1, np.int64)
    for i, hypothesis in enumerate(words):
        table[i, : len(hypothesis)] = [ids.get(word, -1) for word in hypothesis]
    steps = np.arange(longest + 1)
    row = np.tile(steps, (len(words), 1))  # distance of 0 reference words to j words, (H, J + 1)
    for number, word in enumerate(target, 1):
        other = np.empty_like(row)
        other[:, 0] = number
        other[:, 1:] = np.minimum(row[:, 1:] + 1, row[:, :-1] + (table != ids[word]))
        # Insertions run along the row: the least of other[k] + (j - k) over k <= j.
        row = np.minimum.accumulate(other - steps, axis=1) + steps
    return row[np.arange(len(words)), list(map(len, words))]


def _error_rate(edits: np.ndarray, words: np.ndarray) -> float:
    """Return the sum of edits (U,) over the sum of reference words (U,); it may exceed 1."""
    # An empty reference adds its edits and no words.
    if not words.sum():
        raise MetaseqError("the references hold no word, so there is no word error rate")
    return float(edits.sum() / words.sum())


def _difference_interval(
    edits: np.ndarray, baseline: np.ndarray, words: np.ndarray
) -> tuple[float, float]:
    """Return the central 95 % of WER(edits) - WER(baseline) over resampled utterances.

    Utterances are drawn with replacement (Bisani and Ney 2004), the same ones for both systems. All
    arguments are (U,).
    """
    rng = generator("word error rate", "bootstrap")
    count = len(words)
    differences = []
    for _ in range(DRAWS):
        drawn = rng.integers(count, size=count)
        # A draw of only empty references has no rate.
        if total := words[drawn].sum():
            differences.append((edits[drawn] - baseline[drawn]).sum() / total)
    low, high = np.quantile(differences, [0.025, 0.975])
    return float(low), float(high)


def combine_scores(
    lists: Sequence[NBest], plls: Sequence[np.ndarray], weight: float
) -> list[np.ndarray]:
    """Return score + weight * PLL of the hypotheses of each list, (H,) each."""
    return [nbest.scores + weight * pll for nbest, pll in zip(lists, plls)]


def _edits_of_best(lists: Sequence[NBest], scores: Sequence[np.ndarray]) -> np.ndarray:
    """Return the edits (U,) of each list's best hypothesis, the first one if equal."""
    return np.array([nbest.edits[values.argmax()] for nbest, values in zip(lists, scores)])


def choose_weight(
    lists: Sequence[NBest], plls: Sequence[np.ndarray], grid: Sequence[float]
) -> float:
    """Return the weight with the fewest edits on `lists`, the smallest one if equal."""
    edits = [(_edits_of_best(lists, combine_scores(lists, plls, w)).sum(), w) for w in grid]
    return min(edits)[1]


def split_rates(
    lists: Sequence[NBest], plls: Sequence[np.ndarray], weight: float
) -> dict[str, Any]:
    """Return the word error rates of a set: without re-ranking, at best ("oracle"), and with it.

    Rates are fractions of the reference words. "difference" is "wer" minus "one_best_wer" (below 0:
    re-ranking helps), "interval" the central 95 % of it over resampled utterances.
    """
    words = np.array([nbest.words for nbest in lists])
    baseline = _edits_of_best(lists, [nbest.scores for nbest in lists])
    edits = _edits_of_best(lists, combine_scores(lists, plls, weight))
    one_best, wer = _error_rate(baseline, words), _error_rate(edits, words)
    return {
        "utterances": len(lists),
        "hypotheses": sum(len(nbest.texts) for nbest in lists),
        "words": int(words.sum()),
        "one_best_wer": one_best,
        "oracle_wer": _error_rate(np.array([nbest.edits.min() for nbest in lists]), words),
        "wer": wer,
        "difference": wer - one_best,
        "interval": _difference_interval(edits, baseline, words),
    }
