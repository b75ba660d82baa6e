"""Opening whichever tokenizer a folder holds; importing this module registers the built-in kinds.

A folder holds `tokenizer_options.json` (the kind), the model file of that kind and `dict.txt`; or,
without the first, the files of a transformers tokenizer, which are converted to one form here.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from metaseq_lm.core.errors import MetaseqError, MissingError
from metaseq_lm.core.files import read_json
from metaseq_lm.core.registry import TOKENIZERS
from metaseq_lm.data.tokenizers import byte_bpe, plain, sentencepiece_models, wordpiece
from metaseq_lm.data.tokenizers.base import DICT_FILE, OPTIONS_FILE, OPTIONS_VERSION, Tokenizer
from metaseq_lm.data.tokenizers.vocabulary import FAMILIES, Vocabulary
from metaseq_lm.data.tokenizers.wordpiece import wordpiece_library

_BUILTIN = (byte_bpe, plain, sentencepiece_models, wordpiece)


@dataclass(frozen=True)
class _Source:
    """The parts to restore a tokenizer from: kind, the file to name in messages, model, options."""

    kind: str
    path: Path
    model: bytes
    options: dict[str, Any] = field(default_factory=dict)


def tokenizer_class(name: str) -> type[Tokenizer]:
    """Return the registered class; UsageError with similar names for an unknown one."""
    kind: type[Tokenizer] = TOKENIZERS.entry(name).value
    return kind


def _saved_source(folder: Path, prefix: str) -> _Source:
    """Return the content of the options file of a folder and of the model file that it names."""
    path = folder / (prefix + OPTIONS_FILE)
    try:
        options = read_json(path)
        version, kind = options["version"], options["tokenizer"]
    except (ValueError, KeyError) as error:
        raise MetaseqError(f"{path}: damaged ({error}); preprocess again") from error
    if version != OPTIONS_VERSION or not isinstance(kind, str):
        raise MetaseqError(f"{path}: made by another version; preprocess again")
    name = tokenizer_class(kind).model_file
    path = folder / (prefix + (name or DICT_FILE))
    if not path.is_file():
        raise MetaseqError(f"{path}: no such file, but {kind} needs it")
    return _Source(kind, path, path.read_bytes() if name else b"", options)


def load_tokenizer(folder: str | Path, prefix: str = "") -> Tokenizer:
    """Open the tokenizer of a data folder; MetaseqError if it is missing, damaged or inconsistent.

    The rows of `dict.txt` must be exactly the symbols of the model. `prefix` is the prefix that the
    tokenizer was saved with.
    """
    folder = Path(folder)
    has_options = bool(prefix) or (folder / OPTIONS_FILE).is_file()
    source = _saved_source(folder, prefix) if has_options else transformers_source(folder)
    dictionary, vocabulary = folder / (prefix + DICT_FILE), None
    if dictionary.is_file():
        vocabulary = Vocabulary.load(dictionary)
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


def transformers_source(folder: Path) -> _Source:
    """Return the tokenizer of a folder without our options file; MetaseqError if it has none.

    `tokenizer.json` comes first, then `vocab.txt` (BERT), `vocab.json` and `merges.txt` (RoBERTa),
    `spm.model`.
    """
    whole, words, symbols, merges, pieces = (
        folder / n for n in ("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "spm.model")
    )
    if whole.is_file():
        model = whole.read_bytes()
        kind = _guess_kind(model)
        if kind == "byte_bpe":
            return _Source(kind, whole, model)
        if kind == "unigram" and not pieces.is_file():
            raise MetaseqError(
                f"{whole}: a unigram model; it can be used only with its spm.model beside it"
            )
    try:
        if whole.is_file() and kind == "wordpiece":
            return _Source(kind, whole, _as_configured(model, _settings(folder)))
        if words.is_file():
            return _Source("wordpiece", words, _wordpiece(words, _settings(folder)))
        if symbols.is_file() and merges.is_file():
            return _Source("byte_bpe", symbols, _byte_bpe(symbols, merges, _settings(folder)))
    except (ValueError, OSError) as error:
        raise MetaseqError(f"{folder}: its tokenizer cannot be read: {error}") from error
    if pieces.is_file():
        return _Source("sentencepiece_unigram", pieces, pieces.read_bytes())
    raise MissingError(
        f"{folder}: no tokenizer here ({OPTIONS_FILE}, tokenizer.json, vocab.txt, vocab.json with "
        "merges.txt, or spm.model); give the folder that 'metaseq-lm preprocess --destdir' filled, "
        "or write the tokenizer of a transformers model into its folder with save_pretrained"
    )


def _guess_kind(model: bytes) -> str:
    """Return the kind of a `tokenizer.json`, in older files by fields that only one kind has."""
    try:
        content = json.loads(model)
    except (ValueError, RecursionError):
        return "byte_bpe"  # restoring reports the error
    part = content.get("model") if isinstance(content, dict) else None
    if not isinstance(part, dict):
        return "byte_bpe"
    if part.get("type") == "Unigram":
        return "unigram"
    if part.get("type") == "WordPiece" or "max_input_chars_per_word" in part:
        return "wordpiece"
    return "byte_bpe"


def _as_configured(model: bytes, settings: dict[str, Any]) -> bytes:
    """Return a `tokenizer.json` of WordPiece as the transformers library understands it.

    For the classes of BERT, DistilBERT and ELECTRA tokenizer_config.json, with the library's
    defaults for missing settings, overrides the normalizer in the file.
    """
    content = json.loads(model)
    normalizer = content.get("normalizer")
    name = str(settings.get("tokenizer_class", "Bert"))
    if not settings or not name.startswith(("Bert", "DistilBert", "Electra")):
        return model
    if not isinstance(normalizer, dict) or normalizer.get("type") != "BertNormalizer":
        return model
    lower, accents, cjk = _bert_flags(settings)
    flags = {"lowercase": lower, "strip_accents": accents, "handle_chinese_chars": cjk}
    content["normalizer"] = normalizer | flags
    return model if content["normalizer"] == normalizer else json.dumps(content).encode()


def _bert_flags(settings: dict[str, Any]) -> tuple[bool, bool | None, bool]:
    """Return whether to lower case, strip accents (None: as for case), and separate ideographs."""
    lower = settings.get("do_lower_case", True)
    accents = settings.get("strip_accents")
    cjk = settings.get("tokenize_chinese_chars", True)
    if not all(isinstance(flag, (bool, type(None))) for flag in (lower, accents, cjk)):
        raise ValueError("tokenizer_config.json: do_lower_case and the like are true or false")
    return bool(lower), accents, bool(cjk)


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    try:
        return read_json(path) if path.is_file() else {}
    except ValueError as error:
        raise MetaseqError(f"{path}: damaged ({error})") from error


def _wordpiece(path: Path, settings: dict[str, Any]) -> bytes:
    with open(path, encoding="utf-8") as file:
        symbols = [line.rstrip("\n") for line in file]
    ids = {symbol: i for i, symbol in enumerate(symbols)}
    if len(ids) < len(symbols):
        twice = next(s for i, s in enumerate(symbols) if ids[s] != i)
        raise ValueError(f"{path.name} has the symbol {twice!r} twice")
    lower, accents, cjk = _bert_flags(settings)
    # 100 characters, as in the transformers library for such files.
    library = wordpiece_library(ids, 100, not lower, accents, cjk)
    library.add_special_tokens([s for s in FAMILIES["bert"] if s in ids])
    return str(library.to_str()).encode()


def _byte_bpe(symbols: Path, merges: Path, settings: dict[str, Any]) -> bytes:
    try:
        bpe = models.BPE.from_file(str(symbols), str(merges))
    except Exception as error:  # the library raises bare Exception for any malformed content
        raise ValueError(f"{symbols.name}, {merges.name}: {error}") from error
    library = tokenizers.Tokenizer(bpe)
    prefix = bool(settings.get("add_prefix_space", False))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    library.decoder = decoders.ByteLevel()
    known = library.get_vocab()
    library.add_special_tokens([s for s in FAMILIES["roberta"] if s in known])
    return str(library.to_str()).encode()
