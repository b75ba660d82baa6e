"""Options that several kinds of datasets share, each declared once.

A kind takes one by `option_of(SharedOptions, NAME)`.
"""

from dataclasses import dataclass
from pathlib import Path

from metaseq_lm.core.options import option
from metaseq_lm.data.storage.tables import QUOTING


@dataclass(frozen=True)
class SharedOptions:
    """Options of several kinds; `shown_with` is the kind with which `--help` lists an option."""

    labelled: str | None = option(
        None,
        "the files are a labelled set, written to D/NAME",
        metavar="NAME",
        shown_with="labelled",
    )
    documents: str = option(
        "lines",
        "a document is a line, or the lines (sentences) up to a blank line",
        choices=("lines", "blank"),
    )
    min_frequency: int = option(
        1, "only words, characters or merged pairs that occur this often get a symbol", at_least=1
    )
    tokenizer_corpus: tuple[Path, ...] = option(
        (),
        "text the tokenizer learns from (default: the train split); sentencepiece holds it in "
        "memory, so give a sample of a large corpus",
    )
    tokenizer_from: Path | None = option(
        None,
        "use the tokenizer of this folder (default: train one; of labelled sets: that of D)",
        metavar="DIR",
    )
    plain_text: bool = option(
        False, "the files are plain text although they look like JSON, a table or binary data"
    )
    text_columns: tuple[str, ...] | None = option(
        None, "default: text, or text_a,text_b", metavar="A[,B]", shown_with="labelled"
    )
    columns: tuple[str, ...] | None = option(
        None,
        "column names of CSV and TSV files that have no header row",
        metavar="A,B,...",
        shown_with="labelled",
    )
    quoting: str = option(
        QUOTING[0],
        "whether quotes around a field are syntax (csv) or text (none); auto: syntax in CSV files, "
        "and in TSV files in which all are written so",
        choices=QUOTING,
        shown_with="labelled",
    )
    labels_from: Path | None = option(
        None,
        "the classes of this set, a folder D/NAME, in its order; for --tagged, --treebank too",
        metavar="SET",
        shown_with="labelled",
    )
    drop_overlap_with: tuple[str, ...] = option(
        (),
        "leave out training sentences that occur in an evaluation split of these sets of D, or in "
        "these files in CoNLL columns or .conllu; only letters (in lower case) are compared, and "
        "digits (all as 0), not blanks and signs",
        metavar="SET",
        nargs="+",
        shown_with="words",
    )
    word_column: int | None = option(
        None,
        "column of the words, from 0, or negative from the right (default: 0)",
        shown_with="words",
    )
