"""A masked-LM step of 12 layers, width 256, with and without engine.compile=true."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mlm_speed import LENGTH, OVERRIDES, VOCAB
from timing import Figure, Variant, memory, paired, speed
from training import made_up_corpus, updates


def figures(folder: Path, given: Path | None, quick: bool) -> Iterator[Figure]:
    """Yield step time and peak memory; the warm-up steps include compilation."""
    rows = 8 if quick else 32
    folder = made_up_corpus(folder / "mlm", VOCAB, 400 * (LENGTH - 2) * 4)
    variants = {
        name: Variant(
            updates,
            {
                "data": folder,
                "overrides": [*OVERRIDES, f"engine.compile={name}"],
                "rows": rows,
            },
        )
        for name in ("true", "false")
    }
    done = paired(variants, rounds=5 if quick else 3, warm_up=3)
    note = f"12 layers, width 256, {rows} rows of {LENGTH}, vocabulary {VOCAB}, dropout 0.1"
    yield speed("compile_step", done["true"], done["false"], "steps/s", None, note)
    yield memory("compile_memory", done["true"], done["false"], None, note)
