"""Options shared by several kinds of data sets, as base classes of their option classes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from metaseq_lm.core.options import option
from metaseq_lm.data.records.record import QUOTING


@dataclass(frozen=True)
class TokenizerFromOptions:
    """The tokenizer of a data set."""

    tokenizer_from: Path | None = option(
        None,
        "use the tokenizer of this folder (default: train one; for labelled sets: that of D)",
        metavar="DIR",
    )


@dataclass(frozen=True)
class VocabularyOptions(TokenizerFromOptions):
    """How a tokenizer is trained, if none is given."""

    min_frequency: int = option(
        1, "minimum count of a word, character or merged pair to get a symbol", at_least=1
    )
    tokenizer_corpus: tuple[Path, ...] = option(
        (),
        "text the tokenizer learns from (default: the train split); sentencepiece holds it in "
        "memory, so give a sample of a large corpus",
    )


@dataclass(frozen=True)
class DocumentOptions:
    """Document boundaries."""

    documents: str = option(
        "lines",
        "a document is a line, the lines (sentences) up to a blank line (blank), these joined by "
        "spaces where lines are wrapped (paragraphs), or a file of such paragraphs (file)",
        choices=("lines", "blank", "paragraphs", "file"),
    )


@dataclass(frozen=True)
class PlainTextOptions:
    """Handling of text that looks like another kind of file."""

    plain_text: bool = option(
        False, "the files are plain text although they look like JSON, a table or binary data"
    )


@dataclass(frozen=True)
class TableOptions:
    """How tables are read."""

    columns: tuple[str, ...] | None = option(
        None, "column names of CSV and TSV files that have no header row", metavar="A,B,..."
    )
    text_columns: tuple[str, ...] | None = option(
        None, "labelled sets: default text, or text_a,text_b", metavar="A[,B]"
    )
    quoting: str = option(
        QUOTING[0],
        "whether quotes around a field are syntax (csv) or text (none); auto: syntax in CSV "
        "files, and in TSV files that write all of them so",
        choices=QUOTING,
    )


@dataclass(frozen=True)
class WordColumnOptions:
    """The word column of tagged sentences and treebanks, and training sentences to leave out."""

    word_column: int | None = option(
        None, "column of the words, from 0, or negative from the right (default: 0)"
    )
    drop_overlap_with: tuple[str, ...] = option(
        (),
        "leave out training sentences that occur in an evaluation split of these sets of D, or "
        "in these files (CoNLL columns or .conllu); the comparison reads only letters, "
        "lower-cased, and digits, all as 0",
        metavar="SET",
        nargs="+",
    )


@dataclass(frozen=True)
class ClassOptions:
    """The classes of a labelled set."""

    labels_from: Path | None = option(
        None,
        "the classes of this set, a folder D/NAME, in its order; for --tagged, --treebank too",
        metavar="SET",
    )
