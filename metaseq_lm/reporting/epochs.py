"""How many times runs see the words of the train split of their data, for `metaseq-lm doctor`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.doctor.findings import ERROR, OK, WARNING, Finding
from metaseq_lm.data.storage.manifest import corpus_fingerprint, train_words
from metaseq_lm.reporting.runs import Run

_ENDED = ("finished", "diverged")


def epochs(folders: Sequence[Path], runs: Sequence[Run]) -> Iterator[Finding]:
    """Yield for each run how often it has seen, or will see, the words of the train split.

    `folders` are the possible data folders of the runs.
    """
    hashes: dict[Path, str | None] = {}
    for folder in filter(Path.is_dir, folders):
        try:
            hashes[folder] = corpus_fingerprint(folder)
        except MetaseqError as error:
            yield Finding(ERROR, str(error))
    for run in runs:
        stored, path = run.recorded.get("corpus"), Path(run.values.get("data") or "")
        trained_on = [folder for folder, corpus in hashes.items() if corpus == stored]
        if stored is None:  # without results there is no hash, so the path in the config decides
            trained_on = [folder for folder in hashes if folder.resolve() == path.resolve()]
        if not trained_on:
            names = " or ".join(map(str, folders))
            text = f"{run.name}: its data, {run.values.get('data')}, are not {names} as it is now"
            yield Finding(ERROR, f"{text}; name the data folder of this run, or leave it out")
        else:
            yield _epochs_of(run, train_words(trained_on[0]))


def _epochs_of(run: Run, words: int | None) -> Finding:
    if not words:
        reason = "the data do not say how many words train has; preprocess the text again"
        return Finding(WARNING, f"{run.name}: epochs are not known: {reason}")
    is_over = run.status in _ENDED
    seen = run.costs["words"] if is_over else _words_at_end(run)
    if seen is None:
        reason = "it counted no words" if is_over else "no words are logged, nor is there a limit"
        return Finding(WARNING, f"{run.name}: epochs are not known: {reason}")
    verb = "saw" if is_over else "will see, by its limits,"
    text = f"{run.name}: {verb} the {words:,} words of train {seen / words:.2f} times"
    if seen <= words:
        return Finding(OK, text)
    remedy = "more text, or fewer updates: the order of objectives may change where text repeats"
    return Finding(WARNING, f"{text}; {remedy}")


def _words_at_end(run: Run) -> float | None:
    """Return the words that an unfinished run will have seen at its end; None if unknown."""
    updates, counts = run.series("train.words_seen")
    limit = float(run.values.get("trainer.max_words") or 0)
    if not updates or not counts[-1]:
        return limit or None
    _, seconds = run.series("train.seconds")
    spent = {"max_update": updates[-1], "max_words": counts[-1], "max_seconds": seconds[-1]}
    limits = {name: float(run.values.get(f"trainer.{name}") or 0) for name in spent}
    # The run is taken to go on at its present rate up to the first of its limits in updates, words
    # and seconds; a limit in FLOPs may end it earlier.
    share = max((spent[name] / limit for name, limit in limits.items() if limit), default=0.0)
    return counts[-1] / min(share, 1.0) if share else None
