"""Pseudo-log-likelihoods: the sum over a sentence's tokens of ln p(token | the other tokens).

A causal LM gives ln p(token | those before it) instead. A masked LM takes one pass a token, other
objectives one a sentence; see the last line on stderr.
One sentence a line gives one line each, in the same order, skipped ones left out:
    pll<TAB>tokens<TAB>text
pll is in nats and written so that it reads back as the same number, tokens is how many were scored
([CLS] and [SEP] are not), a blank line has 0 of both. With --tokens a line is JSON instead:
    {"pll": p, "text": t, "tokens": [symbols], "log_probs": [one each]}
With --pairs the input is JSON lines with sentence_good and sentence_bad (as BLiMP's), and the output
one JSON object: per file and overall pairs, ties and accuracy, the share of the pairs whose good
sentence has the strictly larger pll. A tie is no success.

examples:
  metaseq-lm score runs/mlm --input sentences.txt --out plls.tsv
  metaseq-lm score runs/mlm --input blimp/*.jsonl --pairs engine.device=cpu
  metaseq-lm score runs/electra-tt --input sentences.txt criterion.pll_formula=dissertation
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metaseq_lm.core.errors import say
from metaseq_lm.core.files import to_json
from metaseq_lm.core.output import is_quiet

if TYPE_CHECKING:
    from metaseq_lm.data.labelled.files import Sentence
    from metaseq_lm.training.scoring import Score, SentenceScorer

PROGRESS = True
HELP = "score sentences by pseudo-log-likelihood; accuracy on minimal pairs"
OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add("run_path", metavar="RUN", help="checkpoint, or run folder (its best one, else its last)")
    add("--input", nargs="+", required=True, metavar="F", help="text files; - is standard input")
    add("--out", metavar="F", help="file for the output (default: standard output)")
    add("--pairs", action="store_true", help="the input is minimal pairs")
    add("--tokens", action="store_true", help="the log-probability of each token, as JSON lines")
    add_scoring_arguments(parser)
    add(
        "--too-long",
        choices=("fail", "skip", "cut"),
        default="fail",
        help="sentences longer than the run's rows: fail, skip (a pair with its other sentence), "
        "or cut to the first tokens (default: %(default)s)",
    )
    add(
        "--on-bad-utf8",
        choices=("replace", "skip", "fail"),
        default="replace",
        help="lines with invalid UTF-8: replace the bytes by U+FFFD, skip the line, or fail "
        "(default: %(default)s)",
    )


def add_scoring_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what every command that scores sentences takes."""
    add = parser.add_argument
    add(
        "--batch-tokens",
        type=int,
        default=8192,
        metavar="N",
        help="tokens of a pass at most; changes speed and memory only (default: %(default)s)",
    )
    add("--data", help="folder with the tokenizer (default: the data the run was trained on)")
    add("--user-dir", help="plug-in the run was trained with")


def run(args: argparse.Namespace) -> int:
    """Score the input with the run and write the result."""
    from metaseq_lm import plugins
    from metaseq_lm.core.config import split_overrides
    from metaseq_lm.core.errors import UsageError
    from metaseq_lm.data.labelled.files import read_pairs, read_sentences

    if args.pairs and args.tokens:
        raise UsageError("--tokens shows single sentences; leave it out with --pairs")
    sources, options = split_overrides(args.input + args.overrides)
    if len(set(sources)) < len(sources):
        raise UsageError("--input names a file twice")
    if args.out and Path(args.out).is_dir():
        raise UsageError(f"--out {args.out} is a folder; give the name of a file")
    read: Callable[..., tuple[list[Any], int]] = read_pairs if args.pairs else read_sentences
    files = {source: read(source, args.on_bad_utf8) for source in sources}
    plugins.check_runs([args.run_path], args.user_dir, options)
    plugins.load_all(args.user_dir)
    from metaseq_lm.training.restore import open_run
    from metaseq_lm.training.scoring import SentenceScorer

    opened = open_run(args.run_path, args.data, args.user_dir, options)
    scorer = SentenceScorer(opened, args.batch_tokens, args.too_long)
    if args.pairs:
        pairs = {source: lines for source, (lines, _) in files.items()}
        output, skipped = score_pairs(scorer, pairs)
    else:
        sentences = [sentence for lines, _ in files.values() for sentence in lines]
        output, skipped = score_sentences(scorer, sentences, args.tokens)
    write_output(output, args.out)
    invalid = sum(count for _, count in files.values())
    for count, reason in ((invalid, "invalid UTF-8"), (skipped, "too long")):
        if count:
            say(f"skipped for {reason}: {count:,}")
    if not is_quiet():
        say(str(scorer.cost))
    return 0


def write_output(output: bytes, path: str | None) -> None:
    """Write `output` to a file, as a whole or not at all, or to standard output."""
    from metaseq_lm.core.files import write_atomic

    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(path), output)
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(output)  # UTF-8 whatever the terminal's encoding, as in a file
    sys.stdout.flush()


def score_sentences(
    scorer: "SentenceScorer", sentences: Sequence["Sentence"], tokens: bool
) -> tuple[bytes, int]:
    """Return the output for single sentences, and how many were skipped."""
    from metaseq_lm.evaluation.nbest import score_lines

    rows = [
        (score, sentence.text)
        for score, sentence in zip(scorer.score(sentences), sentences)
        if score is not None
    ]
    skipped = len(sentences) - len(rows)
    if not tokens:
        return score_lines((score.pll, len(score.tokens), text) for score, text in rows), skipped
    symbols = scorer.vocabulary.symbols
    lines = [
        {
            "pll": score.pll,
            "text": text,
            "tokens": [symbols[i] for i in score.tokens],
            "log_probs": score.log_probs.tolist(),
        }
        for score, text in rows
    ]
    return "".join(to_json(line) + "\n" for line in lines).encode(), skipped


def score_pairs(
    scorer: "SentenceScorer", files: dict[str, list[tuple["Sentence", "Sentence"]]]
) -> tuple[bytes, int]:
    """Return the summary of minimal pairs by file and overall, and how many pairs were skipped."""
    sentences = [s for pairs in files.values() for pair in pairs for s in pair]
    scores = iter(scorer.score(sentences))
    scored = {source: [(next(scores), next(scores)) for _ in files[source]] for source in files}
    overall = accuracy([pair for pairs in scored.values() for pair in pairs])
    summary = {source: accuracy(pairs) for source, pairs in scored.items()}
    output = to_json({"overall": overall, "files": summary}, 1) + "\n"
    return output.encode(), len(sentences) // 2 - int(overall["pairs"])


def accuracy(pairs: Sequence[tuple["Score | None", "Score | None"]]) -> dict[str, Any]:
    """Return number, ties and accuracy of scored pairs (good, bad), None where none was scored."""
    plls = [(good.pll, bad.pll) for good, bad in pairs if good is not None and bad is not None]
    correct = sum(good > bad for good, bad in plls)
    ties = sum(good == bad for good, bad in plls)
    return {"accuracy": correct / len(plls) if plls else None, "pairs": len(plls), "ties": ties}
