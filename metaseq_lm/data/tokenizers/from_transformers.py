"""Tokenizer files as the transformers library writes them, brought into one form: `tokenizer.json`."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.files import read_json
from metaseq_lm.data.tokenizers.base import OPTIONS_FILE
from metaseq_lm.data.tokenizers.byte_bpe import is_object
from metaseq_lm.data.tokenizers.vocabulary import FAMILIES, UNK


@dataclass(frozen=True)
class Source:
    """What a tokenizer is restored from: its kind, the file to name in messages, model, options."""

    kind: str
    path: Path
    model: bytes
    options: dict[str, Any] = field(default_factory=dict)


def transformers_source(folder: Path) -> Source:
    """Return the tokenizer of a folder without our options file; MetaseqError if it has none.

    `tokenizer.json` comes first, then `vocab.txt` (BERT), `vocab.json` and `merges.txt` (RoBERTa),
    `spm.model`.
    """
    whole, words, symbols, merges, pieces = (
        folder / n for n in ("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "spm.model")
    )
    if whole.is_file():
        model = whole.read_bytes()
        kind = _kind(model)
        if kind == "byte_bpe":
            return Source(kind, whole, model)
        if kind == "unigram" and not pieces.is_file():
            raise MetaseqError(
                f"{whole}: a unigram model; it can be used only with its spm.model beside it"
            )
    try:
        if whole.is_file() and kind == "wordpiece":
            return Source(kind, whole, _as_configured(model, _settings(folder)))
        if words.is_file():
            return Source("wordpiece", words, _wordpiece(words, _settings(folder)))
        if symbols.is_file() and merges.is_file():
            return Source("byte_bpe", symbols, _byte_bpe(symbols, merges, _settings(folder)))
    except (ValueError, OSError) as error:
        raise MetaseqError(f"{folder}: its tokenizer cannot be read: {error}") from error
    if pieces.is_file():
        return Source("sentencepiece_unigram", pieces, pieces.read_bytes())
    raise MetaseqError(
        f"{folder}: no tokenizer here ({OPTIONS_FILE}, tokenizer.json, vocab.txt, vocab.json with "
        "merges.txt, or spm.model); give the folder that 'metaseq-lm preprocess --destdir' filled"
    )


def _kind(model: bytes) -> str:
    """Return the kind of a `tokenizer.json`; older files have no type, so ask what only one has."""
    try:
        content = json.loads(model)
    except (ValueError, RecursionError):
        return "byte_bpe"  # restoring says what is wrong
    part = content.get("model") if is_object(content) else None
    if not is_object(part):
        return "byte_bpe"
    if part.get("type") == "Unigram":
        return "unigram"
    wordpiece = part.get("type") == "WordPiece" or "max_input_chars_per_word" in part
    return "wordpiece" if wordpiece else "byte_bpe"


def _as_configured(model: bytes, settings: dict[str, Any]) -> bytes:
    """Return a `tokenizer.json` of WordPiece as the transformers library understands it.

    For BERT's and ELECTRA's classes tokenizer_config.json, with the library's defaults for what it
    does not say, wins over the normalizer in the file.
    """
    content = json.loads(model)
    normalizer = content.get("normalizer")
    known = str(settings.get("tokenizer_class", "Bert")).startswith(("Bert", "Electra"))
    if not settings or not known or not is_object(normalizer):
        return model
    if normalizer.get("type") != "BertNormalizer":
        return model
    lower, accents, cjk = _bert_flags(settings)
    wanted = {"lowercase": lower, "strip_accents": accents, "handle_chinese_chars": cjk}
    content["normalizer"] = normalizer | wanted
    return model if content["normalizer"] == normalizer else json.dumps(content).encode()


def _bert_flags(settings: dict[str, Any]) -> tuple[bool, bool | None, bool]:
    """Return whether case goes, accents go (None: as case does), and ideographs stand alone."""
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


def wordpiece_library(
    ids: dict[str, int], longest: int, cased: bool, accents: bool | None = None, cjk: bool = True
) -> tokenizers.Tokenizer:
    """Return BERT's tokenizer for a vocabulary; words of more than `longest` characters are [UNK].

    `accents` says whether they are stripped; None: as case is. `cjk` puts spaces around ideographs.
    """
    library = tokenizers.Tokenizer(
        models.WordPiece(ids, unk_token=UNK, max_input_chars_per_word=longest)
    )
    library.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=cjk, strip_accents=accents, lowercase=not cased
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    return library


def _wordpiece(path: Path, settings: dict[str, Any]) -> bytes:
    with open(path, encoding="utf-8") as file:
        symbols = [line.rstrip("\n") for line in file]
    ids = {symbol: i for i, symbol in enumerate(symbols)}
    if len(ids) < len(symbols):
        twice = next(s for i, s in enumerate(symbols) if ids[s] != i)
        raise ValueError(f"{path.name} has the symbol {twice!r} twice")
    lower, accents, cjk = _bert_flags(settings)
    # 100 characters, as the transformers library has it for such files.
    library = wordpiece_library(ids, 100, not lower, accents, cjk)
    library.add_special_tokens([s for s in vars(FAMILIES["bert"]).values() if s in ids])
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
    library.add_special_tokens([s for s in vars(FAMILIES["roberta"]).values() if s in known])
    return str(library.to_str()).encode()
