"""The sentence on when, and with what, the runs of a league were made."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from outcomes import expect_facts

from metaseq_lm.reporting import archive
from metaseq_lm.reporting.provenance import describe_provenance
from metaseq_lm.reporting.runs import Run

VERSIONS = {"python": "3.12.3", "torch": "2.9.0"}


def made(label: str, day: int, code: str = "c1", **results: Any) -> Run:
    """Return a run of an hour of a day."""
    facts = {
        "status": "finished",
        "started": f"2026-11-{day:02}T10:00:00+00:00",
        "ended": f"2026-11-{day:02}T11:00:00+00:00",
        "code": code,
        "versions": VERSIONS,
        "architecture": "x86_64",
        "threads": 1,
        **results,
    }
    return Run(Path(f"{label}/{day}"), {"label": label}, [], facts)


def test_the_first_starts_and_the_last_end_are_said_also_from_an_archive(tmp_path: Path) -> None:
    trials, finals = [made("tune", 3), made("tune", 2)], [made("final", 5), made("final", 4)]
    controls = [made("control", 1), made("control", 6)]
    sentence = describe_provenance(trials, finals, [*trials, *finals, *controls])
    started = ("trial started 2026-11-02 10:00:00", "run started 2026-11-04 10:00:00")
    software = ("code c1;", "python 3.12.3, torch 2.9.0", "x86_64, 1 thread")
    expect_facts(sentence, *started, "ended 2026-11-06 11:00:00 UTC", *software, "No run records")
    archive.write(tmp_path / "runs.jsonl.gz", [*trials, *finals, *controls])
    runs = archive.read(tmp_path / "runs.jsonl.gz")
    assert describe_provenance(runs[:2], runs[2:4], runs) == sentence


def test_all_codes_are_named_and_what_is_not_recorded_is_said() -> None:
    runs = [made("final", 4), made("final", 4, code="c2"), made("final", 5, started=None)]
    sentence = describe_provenance([], runs, runs)
    expect_facts(sentence, "code c1 (2 runs)", "code c2 (1 run)", "1 of 3 runs")
    assert "trial" not in sentence
    old = [Run(Path(name), {}, [], {"code": "c1"} if name else None) for name in ("a", "")]
    expect_facts(describe_provenance([], old, old), "not recorded;", "code c1.", "No run records")


def test_it_is_said_how_many_runs_record_their_plan() -> None:
    runs = [replace(made("final", day), plan="0" * 16) for day in (1, 2)]
    expect_facts(describe_provenance([], runs, runs), "Each run records")
    mixed = [*runs, made("final", 3)]
    expect_facts(describe_provenance([], mixed, mixed), "2 of 3 runs record")
