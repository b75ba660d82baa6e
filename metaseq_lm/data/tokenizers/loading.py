"""Opening whichever tokenizer a folder holds; importing this module registers the built-in kinds.

A folder holds `tokenizer_options.json` (the kind), the model file of that kind and `dict.txt`; or,
without the first, the files of a transformers tokenizer.
"""

from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.files import read_json
from metaseq_lm.core.registry import TOKENIZERS
from metaseq_lm.data.tokenizers import byte_bpe, plain, sentencepiece_models, wordpiece
from metaseq_lm.data.tokenizers.base import DICT_FILE, OPTIONS_FILE, OPTIONS_VERSION, Tokenizer
from metaseq_lm.data.tokenizers.from_transformers import Source, transformers_source
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary

BUILTIN = (byte_bpe, plain, sentencepiece_models, wordpiece)


def tokenizer_class(name: str) -> type[Tokenizer]:
    """Return the registered class; an unknown name is a UsageError with the near ones."""
    kind: type[Tokenizer] = TOKENIZERS.entry(name).value
    return kind


def _read_options(path: Path) -> dict[str, Any]:
    try:
        options = read_json(path)
        known = options["version"] == OPTIONS_VERSION and isinstance(options["tokenizer"], str)
    except (ValueError, KeyError) as error:
        raise MetaseqError(f"{path}: damaged ({error}); preprocess again") from error
    if not known:
        raise MetaseqError(f"{path}: made by another version; preprocess again")
    return options


def _saved_source(folder: Path, prefix: str) -> Source:
    """Return what the options file of a folder and the model file it asks for hold."""
    options = _read_options(folder / (prefix + OPTIONS_FILE))
    name = tokenizer_class(options["tokenizer"]).model_file
    path = folder / (prefix + (name or DICT_FILE))
    if not path.is_file():
        raise MetaseqError(f"{path}: no such file, but {options['tokenizer']} needs it")
    return Source(options["tokenizer"], path, path.read_bytes() if name else b"", options)


def load_tokenizer(folder: str | Path, prefix: str = "") -> Tokenizer:
    """Open the tokenizer of a data folder; MetaseqError if it is missing, damaged or inconsistent.

    The rows of `dict.txt` must be exactly the symbols of the model. With a `prefix` it is the one
    that was saved with it.
    """
    folder = Path(folder)
    has_options = bool(prefix) or (folder / OPTIONS_FILE).is_file()
    source = _saved_source(folder, prefix) if has_options else transformers_source(folder)
    dictionary = folder / (prefix + DICT_FILE)
    vocabulary = Vocabulary.load(dictionary) if dictionary.is_file() else None
    kind = tokenizer_class(source.kind)
    try:
        tokenizer = kind.restore(source.model, vocabulary, source.options)
    except ValueError as error:
        raise MetaseqError(f"{source.path}: not usable as {source.kind}: {error}") from error
    if vocabulary is not None:
        _check_rows(dictionary, vocabulary, tokenizer.vocabulary, source.path)
        tokenizer.vocabulary = vocabulary
    return tokenizer


def _check_rows(dictionary: Path, rows: Vocabulary, model: Vocabulary, path: Path) -> None:
    if len(rows) != len(model):
        raise MetaseqError(
            f"{dictionary}: {len(rows)} rows, but {path.name} has {len(model)} symbols; the files "
            "are from different tokenizers, preprocess again"
        )
    for number, (row, symbol) in enumerate(zip(rows.symbols, model.symbols), 1):
        if row != symbol:
            raise MetaseqError(
                f"{dictionary}:{number}: symbol {row!r}, but {path.name} has {symbol!r} as id "
                f"{number - 1}; the files are from different tokenizers, preprocess again"
            )
