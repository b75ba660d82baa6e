"""Describes the conditions under which a run trains, if they are not as configured.

`training.conditions` computes them before the first update, results.json stores them, and reports
repeat them. The numbers may come from somebody else's archive, so any of them may be wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain

KEY = "conditions"  # in results.json
_MANY_UNKNOWN = 0.03
_SMALLER = 0.9  # share of optimizer.lr that a decay peaks at after a tenth of warm-up
REMEDY = (
    "preprocess with a larger --vocab-size, with --tokenizer byte_bpe, which can write every text, "
    "or with a tokenizer of this language (--tokenizer-from)"
)
Shares = Mapping[str, float | None]


def describe_unknown(shares: Shares, least: float = _MANY_UNKNOWN) -> str:
    """Return the share of [UNK] in the tokens of splits; "" if it is at most `least` in all."""
    large = {split: share for split, share in shares.items() if share and share > least}
    return f"tokens that are [UNK]: {_listed(large)}" if large else ""


def describe_conditions(conditions: object, remedy: str = "") -> list[str]:
    """Return a sentence for each condition that is not as configured; none for wrong content.

    `remedy` ends the sentence on [UNK].
    """
    if not isinstance(conditions, Mapping):
        return []
    unknown, cut, batches, rates, best = (
        value if isinstance(value := conditions.get(name), Mapping) else {}
        for name in ("unknown", "cut", "batches", "rates", "best")
    )
    sentences = []
    if text := describe_unknown(_numbers(unknown)):
        is_corpus = any("/" not in split for split in unknown)
        targets = "; so are targets, but those of masked LM" if is_corpus else ""
        sentences.append(f"{text}{targets}{remedy and '; '}{remedy}")
    if rows := {split: share for split, share in _numbers(cut).items() if share > 0}:
        sentences.append(f"rows that are cut ({conditions.get('cut_by')}): {_listed(rows)}")
    for name, about in batches.items():
        numbers = _numbers(about)
        if {"rows", "asked"} <= numbers.keys() and numbers["rows"] < numbers["asked"]:
            epochs = numbers.get("epochs")
            seen = f"; the run sees them {epochs:.3g} times" if epochs else ""
            sentences.append(
                f"batches of {name} have {numbers['rows']:,.0f} rows, not {numbers['asked']:,.0f}: "
                f"there are no more{seen}"
            )
    sentences.append(_describe_rates(_numbers(rates)))
    if best:
        sentences.append(f"the best checkpoint has the {best.get('has')} {best.get('metric')}")
    return [sentence for sentence in sentences if sentence]


def count_conditions(runs: Iterable[object], noun: str = "runs") -> list[str]:
    """Return each sentence on conditions, with the number of runs that it is true for."""
    runs = list(runs)
    counts = Counter(chain.from_iterable(map(describe_conditions, runs)))
    total = f" of {len(runs):,} {noun}" if len(runs) > 1 else ""
    return [f"{count:,}{total}: {text}" if total else text for text, count in counts.items()]


def _describe_rates(rates: Mapping[str, float]) -> str:
    if not {"asked", "highest", "at", "last", "updates"} <= rates.keys():
        return ""
    base, highest, updates = rates["asked"], rates["highest"], rates["updates"]
    parts = []
    # Up to rounding.
    if highest < _SMALLER * base * (1 - 1e-9) or highest > base * (1 + 1e-9):
        at = f"at update {rates['at']:.0f} of {updates:.0f}"
        parts.append(f"at most {highest:.3g}, {at}, not {base:g} (optimizer.lr)")
    if "same_from" in rates:
        parts.append(
            f"{rates['last']:.3g} from update {rates['same_from']:.0f} of {updates:.0f} on"
        )
    elif "length" in rates or (parts and rates["at"] < updates):
        parts.append(f"{rates['last']:.3g} at the last update")
    if "length" in rates:
        parts.append(f"the schedule is for {rates['length']:.0f} updates")
    return f"learning rate: {'; '.join(parts)}" if parts else ""


def _numbers(values: object) -> dict[str, float]:
    pairs = values.items() if isinstance(values, Mapping) else ()
    return {
        str(name): float(value)
        for name, value in pairs
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def _listed(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{100 * share:.3g} % of {name}" for name, share in shares.items())
