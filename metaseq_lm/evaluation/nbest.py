"""N-best lists of a speech recogniser or translator, and files of pseudo-log-likelihoods.

Lists are JSON, `{utterance: {"ref": text, "hyp_1": {"score": number, "text": text}, ...}}`; scores
are log-probabilities. PLLs are lines `pll<TAB>tokens<TAB>text`.
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
from metaseq_lm.data.labelled.files import json_object, text_field
from metaseq_lm.data.storage.text_files import TextFile, blocks
from metaseq_lm.evaluation.wer import edit_distances, word_count

REFERENCE = "ref"
HYPOTHESIS = re.compile(r"hyp_(\d{1,9})")


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
        return edit_distances(self.reference, self.texts)

    @property
    def words(self) -> int:
        """The number of words of the reference."""
        return word_count(self.reference)

    def resorted(self, scores: np.ndarray) -> dict[str, Any]:
        """Return the JSON of the list under other `scores` (H,), the best first."""
        order = np.argsort(-scores, kind="stable")
        hypotheses = {
            f"hyp_{rank}": {"score": float(scores[i]), "text": self.texts[i]}
            for rank, i in enumerate(order, 1)
        }
        return {REFERENCE: self.reference, **hypotheses}


def read_nbest(path: Path) -> list[NBest]:
    """Return the lists of a file; white space at the ends of a text and runs of it are one space.

    MetaseqError with file and utterance for anything that is not such a list.
    """
    content = b"".join(block.data for block in blocks(TextFile(path)))
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MetaseqError(f"{path}: not valid UTF-8 (byte {error.start})") from error
    utterances = json_object(text, str(path))
    if not utterances:
        raise MetaseqError(f"{path}: holds no utterance")
    found = [_utterance(name, lists, path) for name, lists in utterances.items()]
    if not any(nbest.words for nbest in found):
        raise MetaseqError(f"{path}: the references hold no word")
    return found


def _utterance(name: str, fields: Any, path: Path) -> NBest:
    where = f"{path}: utterance {name!r}"
    if not isinstance(fields, dict):
        raise MetaseqError(f"{where}: not a JSON object but {json.dumps(fields)[:60]}")
    found = []
    for key, hypothesis in fields.items():
        if key == REFERENCE:
            continue
        number = HYPOTHESIS.fullmatch(key)
        if number is None:
            raise MetaseqError(f"{where}: {key!r} is neither 'ref' nor 'hyp_' and a number")
        if not isinstance(hypothesis, dict):
            raise MetaseqError(f"{where}: {key}: expected score and text in a JSON object")
        text = one_line(text_field(hypothesis, "text", f"{where}: {key}"))
        found.append((int(number[1]), text, _score(hypothesis, f"{where}: {key}")))
    reference = one_line(text_field(fields, REFERENCE, where))
    if not found:
        raise MetaseqError(f"{where}: has no hypothesis (hyp_1, hyp_2, ...)")
    found.sort(key=lambda item: item[0])
    return NBest(name, reference, [t for _, t, _ in found], np.array([s for _, _, s in found]))


def _score(hypothesis: dict[str, Any], where: str) -> float:
    value = hypothesis.get("score")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise MetaseqError(f"{where}: its score is {json.dumps(value)[:60]}, not a number")
    if not abs(value) <= 1e300:  # NaN too; a JSON number may be too large for a float
        raise MetaseqError(f"{where}: its score is {str(value)[:60]}, not a finite number")
    return float(value)


def one_line(text: str) -> str:
    """Return the words of `text` with one space between them: equal words are scored once."""
    return " ".join(text.split())


def write_nbest(lists: Sequence[NBest], scores: Sequence[np.ndarray]) -> bytes:
    """Return the file of `lists` under other scores, (H,) each, the best hypothesis first."""
    content = {nbest.utterance: nbest.resorted(own) for nbest, own in zip(lists, scores)}
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def score_lines(rows: Iterable[tuple[float, int, str]]) -> bytes:
    """Return the lines `pll<TAB>tokens<TAB>text`; the numbers read back as the same floats."""
    return "".join(f"{pll!r}\t{tokens}\t{text}\n" for pll, tokens, text in rows).encode()


def read_plls(path: Path) -> dict[str, float]:
    """Return the PLL of each text of a file of `score_lines`; MetaseqError with file and line."""
    found = {}
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
        found[fields[2]] = value
    return found
