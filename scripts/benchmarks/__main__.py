"""Measure the package against its peers; scripts/benchmark starts this."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import IO

from timing import Figure, versions

FAMILIES = {
    "moons": "Two Moons: masked LM, hard and soft labels against a plain autograd loop",
    "mlm": "step time, peak memory and FLOP rate of a 12-layer masked LM against transformers",
    "modern": "step time and memory of a modern masked LM against transformers' ModernBERT and a "
    "classic one; packed rows against padded ones",
    "compile": "a 12-layer masked LM with engine.compile=true against the same without",
    "electra": "step time and peak memory of ELECTRA-small against a pair of transformers models",
    "soft": "soft labels at NLP size against a masked-LM step of transformers",
    "meta": "an update of TARTAN, of meta-learned pre-training and of hard "
    "labels in masked-LM updates",
    "bam": "an update of BAM on eight sets with stored teachers against plain fine-tuning on one",
    "cvt": "Cross-View Training: its steps against a plain BiLSTM tagger, many "
    "heads against one set's",
    "preprocess": "byte-level BPE against encode_batch_fast of tokenizers",
    "report": "reports of 500 runs against 10 CPU seconds and 300 MB",
    "sweep": "runs of a sweep, of 1 and of 400 updates, against metaseq-lm train for each",
    "windows": "windows and masks against DataLoader and the collator of transformers",
}
# Families with transformers as the peer.
BESIDE_TRANSFORMERS = ("mlm", "modern", "compile", "electra", "soft", "windows")


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/benchmark",
        description="Ratios against peers, each pair measured in turn in one run, with one thread, "
        "on the CPU. A ratio compares process CPU seconds; 'wall' beside it, wall-clock "
        "seconds. scripts/gpu-check measures on a GPU.",
        epilog="\n".join(f"  {name:<12}{text}" for name, text in FAMILIES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer rounds")
    parser.add_argument("--out", type=Path, help="also write the JSON lines to this file")
    parser.add_argument("--data", type=Path, help="binarised Two Moons (default: made anew)")
    parser.add_argument(
        "--text",
        type=Path,
        help="text for 'preprocess', and for 'modern' one whose lines have the "
        "lengths of its rows (default: generated)",
    )
    options = parser.parse_args()
    peerless = [name for name in options.only if name in BESIDE_TRANSFORMERS]
    if peerless and importlib.util.find_spec("transformers") is None:
        parser.error(
            f"{', '.join(peerless)}: the peer is transformers, which is not installed: pip install "
            "'metaseq-lm[transformers]', or measure others with --only"
        )
    return options


def measure(options: argparse.Namespace, folder: Path, out: IO[str] | None) -> list[Figure]:
    """Measure the chosen families, printing each figure as soon as it is known."""
    inputs = {"moons": options.data, "preprocess": options.text, "modern": options.text}
    found = []
    for name in options.only:
        # Imported late, because comparisons with transformers import it.
        family = importlib.import_module(f"{name}_speed")
        for figure in family.figures(folder, inputs.get(name), options.quick):
            line = json.dumps(figure.as_json())
            print(line, flush=True)
            if out is not None:
                print(line, file=out, flush=True)
            found.append(figure)
    return found


def table(figures: list[Figure]) -> str:
    """Return the figures as a table."""
    head = ("figure", "ours", "reference", "unit", "ratio", "min-max", "wall", "target", "reached")
    rows = [head]
    for f in figures:
        bound = "-" if f.target is None else f"{'<=' if f.lower_is_better else '>='} {f.target:g}"
        rows.append(
            (
                f.name,
                f"{f.ours:.4g}",
                f"{f.reference:.4g}",
                f.unit,
                f"{f.ratio:.2f}",
                f"{f.spread[0]:.2f}-{f.spread[1]:.2f}",
                "-" if f.wall_ratio is None else f"{f.wall_ratio:.2f}",
                bound,
                {None: "-", True: "yes", False: "no"}[f.reached],
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
    return "\n".join(lines)


def main() -> None:
    """Run the command."""
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        out = options.out.open("w", encoding="utf-8") if options.out else None
        figures = measure(options, Path(folder), out)
        if out is not None:
            out.close()
    known = ", ".join(f"{name} {version}" for name, version in versions().items())
    print(f"\n{table(figures)}\n\none thread; {known}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
