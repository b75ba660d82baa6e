"""The tokenizer of a new dataset: command-line options, training, its part of the manifest."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import UsageError, say
from metaseq_lm.core.options import option
from metaseq_lm.core.output import is_quiet
from metaseq_lm.data.records.text_files import Block, TextFile, text_pieces
from metaseq_lm.data.tokenizers.base import OPTIONS_FILE, Tokenizer
from metaseq_lm.data.tokenizers.loading import load_tokenizer, tokenizer_class


@dataclass(frozen=True)
class TokenizerOptions:
    """Which tokenizer to train."""

    tokenizer: str = option(
        "byte_bpe",
        "byte_bpe, wordpiece, sentencepiece_bpe, sentencepiece_unigram, word or char "
        "(default: byte_bpe; of parallel text: word)",
        metavar="KIND",
    )
    cased: bool = option(False, "wordpiece: keep capitals and accents (default: BERT's uncased)")
    vocab_size: int = option(30000, "at most this many symbols", at_least=1)
    word_pattern: str | None = option(
        None, "word: what a word is (default: between white space)", metavar="RE"
    )
    character_coverage: float | None = option(
        None, "sentencepiece: share of the characters that must have a symbol (default: 0.9995)"
    )

    def special_options(self) -> dict[str, Any]:
        """Return the options that only one kind of tokenizer has; UsageError for another kind."""
        kind = self.tokenizer
        options: dict[str, Any] = {}
        for option_name, argument, value, only_kind in (
            ("--word-pattern", "pattern", self.word_pattern, "word"),
            ("--cased", "cased", self.cased or None, "wordpiece"),
        ):
            if value is not None:
                if kind != only_kind:
                    raise UsageError(
                        f"{option_name} does not apply to --tokenizer {kind}, only to {only_kind}"
                    )
                options[argument] = value
        if self.character_coverage is not None:
            if not kind.startswith("sentencepiece") or not 0 < self.character_coverage <= 1:
                raise UsageError(
                    "--character-coverage is above 0, at most 1, and of sentencepiece only"
                )
            options["character_coverage"] = self.character_coverage
        return options

    def train(
        self,
        files: Sequence[tuple[TextFile, Iterable[Block]]],
        min_frequency: int,
        task_tokens: int,
    ) -> Tokenizer:
        """Train the tokenizer on the blocks of files; UsageError if there are none.

        A pair, word or character gets a symbol if it occurs `min_frequency` times; `task_tokens` is
        the number of symbols [CLS0], [CLS1], ...
        """
        kind, options = tokenizer_class(self.tokenizer), self.special_options()
        if not files:
            raise UsageError(
                "there is no text to train a tokenizer on; give --trainpref, --tokenizer-corpus or "
                "--tokenizer-from"
            )
        rest = f" and {len(files) - 3:,} more" if len(files) > 3 else ""
        text = f"training {self.tokenizer} on {', '.join(str(file) for file, _ in files[:3])}{rest}"
        if not is_quiet():
            say(text)
        lines = _training_lines(files)
        return kind.train(lines, self.vocab_size, task_tokens, min_frequency, **options)


def _training_lines(files: Sequence[tuple[TextFile, Iterable[Block]]]) -> Iterator[str]:
    """Yield the lines of all files, long ones in pieces."""
    for file, blocks in files:
        for block in blocks:
            skipped = block.bad if file.skips_bad else ()
            for at, text in enumerate(block.texts):
                if at not in skipped:
                    yield from text_pieces(text)


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the description of a tokenizer in a manifest."""
    return {
        "name": tokenizer.name,
        "hash": tokenizer.fingerprint,
        "vocab_size": len(tokenizer.vocabulary),
        "task_tokens": tokenizer.vocabulary.task_tokens,
    }


def tokenizer_for_set(data: Path, source: Path | None) -> Tokenizer:
    """Return the tokenizer of `source`, by default of the data folder that the set goes into.

    Raises UsageError if the folder has another one.
    """
    if source is None and not data.is_dir():
        raise UsageError(
            f"{data}: no such folder, so it has no tokenizer; give --tokenizer-from DIR, a data "
            "folder or an imported model"
        )
    tokenizer = load_tokenizer(source or data)
    has_one = source is not None and (data / OPTIONS_FILE).is_file()
    if has_one and load_tokenizer(data).fingerprint != tokenizer.fingerprint:
        raise UsageError(
            f"--tokenizer-from {source}: {data} has another tokenizer already; give another "
            "--destdir"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, data: Path) -> None:
    """Write the tokenizer of a set into its data folder, unless that has it."""
    if not (data / OPTIONS_FILE).is_file():
        tokenizer.save(data)
