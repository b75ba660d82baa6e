"""Texts that runs logged as samples of what they learn, on one page."""

from collections.abc import Sequence

from metaseq_lm.reporting.formats import clean
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import Setting


def last_samples(run: Run) -> tuple[int, list[str]]:
    """Return the update and the texts of the last samples in a run's log; (0, []) if there are none."""
    for line in reversed(run.log):
        texts = line.get("texts")
        if line["kind"] == "samples" and isinstance(texts, list):
            return line.get("update", 0), [text for text in texts if isinstance(text, str)]
    return 0, []


def samples_of(settings: Sequence[Setting]) -> list[tuple[str, str]]:
    """Return (heading, text) for each setting: the last samples of its first run that has any."""
    found = []
    for setting in settings:
        for run in setting.runs:
            update, texts = last_samples(run)
            if texts:
                heading = f"{setting.name} (seed {run.seed}, update {update})"
                found.append((heading, "\n\n".join(texts)))
                break
    return found


def to_markdown(samples: Sequence[tuple[str, str]]) -> str:
    """Return a page of samples; indented, so that nothing in them is taken for Markdown."""
    parts = ["# Samples that the runs logged"]
    for heading, text in samples:
        parts.append(f"## {clean(heading)}")
        # splitlines knows more line breaks than "\n", and each would end the block.
        parts.append("\n".join(f"    {clean(line)}".rstrip() for line in text.splitlines()))
    return "\n\n".join(parts) + "\n"
