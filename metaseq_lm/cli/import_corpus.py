"""Turn token files of Megatron-LM or datatrove into a data folder, with the tokenizer beside them.

    metaseq-lm import-corpus --trainpref corpus_text_document --destdir DATA
    metaseq-lm import-corpus --trainpref tokenized/ --tokenizer-from gpt2/ \\
        --strip '<|endoftext|>' --destdir DATA

Give NAME for the files NAME.bin and NAME.idx (Megatron-LM, datatrove's MegatronDocumentTokenizer),
or for NAME.ds and NAME.ds.index (datatrove's DocumentTokenizer), or a folder of such files. Special
symbols that a tokenizer.json lacks, such as [MASK], get the ids after its own.
"""

import argparse
from pathlib import Path

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.secrets import masked

PROGRESS = True
HELP = "turn token files of Megatron-LM or datatrove into a data folder"
_PREFS = {"trainpref": "train", "validpref": "valid", "testpref": "test"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add("--destdir", required=True, type=Path, metavar="D", help="data folder to fill")
    for pref, split in _PREFS.items():
        add(f"--{pref}", nargs="+", type=Path, metavar="F", help=f"files of the {split} split")
    add(
        "--tokenizer-from",
        type=Path,
        metavar="DIR",
        help="folder with the tokenizer.json (default: the folder of the first file)",
    )
    add(
        "--strip",
        nargs="+",
        default=[],
        metavar="SYMBOL",
        help="special symbols to strip from the ends of each sequence, such as <|endoftext|>",
    )
    add("--overwrite", action="store_true", help="replace a data set that is already there")


def run(args: argparse.Namespace) -> int:
    """Import."""
    from metaseq_lm.data.preprocess.pipeline import Request, make_dataset
    from metaseq_lm.data.preprocess.token_files import TokenFiles, foreign_tokenizer, token_files

    prefs = {split: getattr(args, pref) for pref, split in _PREFS.items()}
    splits = {split: token_files(paths) for split, paths in prefs.items() if paths}
    if not splits:
        raise UsageError("nothing to do; give --trainpref, --validpref or --testpref")
    command = masked(["metaseq-lm", *args.argv])
    tokenizer = foreign_tokenizer(args.tokenizer_from or next(iter(splits.values()))[0].parent)
    request = Request(args.destdir, splits, overwrite=args.overwrite, command=command)
    make_dataset(TokenFiles(request, tokenizer, args.strip))
    return 0
