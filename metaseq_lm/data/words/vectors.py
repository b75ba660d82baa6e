"""Word vectors from text files in GloVe's format: a word and its numbers per line, blanks between."""

from collections.abc import Container

import numpy as np

from metaseq_lm.core import random_streams
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.storage.text_files import TextFile
from metaseq_lm.data.words.vocabulary import SPECIAL_WORDS, UNKNOWN, normalise


def read_vectors(file: TextFile, words: Container[str] | None) -> dict[str, np.ndarray]:
    """Return the vectors, float32 (width,), of the normalised words of a file, in its order.

    Only vectors of `words` are kept, or all if it is None. Of words that are the same once normalised
    (1990 and 1991) the one that stands in the file in its normalised form counts, else the first. A
    first line "COUNT WIDTH", as word2vec writes it, is passed over. MetaseqError with file and line
    for a row that has another number of fields or something that is no finite number.
    """
    vectors: dict[str, np.ndarray] = {}
    exact: set[str] = set()
    width = rows = 0
    for number, text, bad in file.lines():
        # Some files end their rows with a blank.
        fields = text.rstrip().split(" ")
        if number == 1 and len(fields) == 2 and fields[0].isdecimal() and fields[1].isdecimal():
            width = int(fields[1])
            continue
        if (bad and file.skips_bad) or not text.strip():
            continue
        width = width or len(fields) - 1
        form = " ".join(fields[: len(fields) - width])
        if (
            width < 1
            or len(fields) <= width
            or not form
            or _is_number(form.rpartition(" ")[2], form)
        ):
            raise MetaseqError(
                f"{file}:{number}: {len(fields)} fields, but the rows before are a word and {width} "
                f"numbers with single blanks between them: {text[:40]!r}"
            )
        rows += 1
        word = normalise(form)
        if word in vectors and (word in exact or word != form):
            continue
        if words is None or word in words:
            vectors[word] = _numbers(fields[len(fields) - width :], f"{file}:{number}")
            if word == form:
                exact.add(word)
    if not rows:
        raise MetaseqError(f"{file}: holds no word vectors")
    for special in SPECIAL_WORDS:
        vectors.pop(special, None)
    return vectors


def _is_number(text: str, whole: str) -> bool:
    # Words with blanks in them exist (GloVe 840B has ". . ."), but a number before the numbers of
    # the row is a number too many.
    try:
        float(text)
    except ValueError:
        return False
    return text != whole


def _numbers(fields: list[str], where: str) -> np.ndarray:
    try:
        values = np.array(fields, np.float32)
    except ValueError as error:
        raise MetaseqError(f"{where}: {error}; expected numbers after the word") from error
    if not np.isfinite(values).all():
        raise MetaseqError(f"{where}: a number that is not finite")
    return values


def vector_table(words: list[str], known: dict[str, np.ndarray], seed: int = 0) -> np.ndarray:
    """Return float32 (words, width): the vectors of `known`, 0 for padding and <unk>.

    Other words, and <start>, <end> and <removed>, get random numbers of the same mean square, which
    depend on the seed and the place only. MetaseqError if no word is known.
    """
    places = [i for i, word in enumerate(words) if word in known]
    if not places:
        raise MetaseqError("none of the words has a vector; is it a file of another language?")
    vectors = np.stack([known[words[i]] for i in places])
    scale = float(np.sqrt(np.mean(vectors.astype(np.float64) ** 2)))
    random = random_streams.generator(seed, "word vectors")
    table = (random.standard_normal((len(words), vectors.shape[1])) * scale).astype(np.float32)
    table[places] = vectors
    table[: UNKNOWN + 1] = 0
    return table
