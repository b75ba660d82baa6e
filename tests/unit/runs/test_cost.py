"""What was spent before a run: sums over what is shared once, and what is not on record."""

import json
from pathlib import Path

import pytest

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.runs import checkpoint, lineage_cost

SPENT = {"seconds": 1.0, "flops": 10.0, "updates": 2}


def run(folder: Path, pretraining: object, **results: object) -> str:
    """Write what is asked of a run that cost SPENT, and return its checkpoint."""
    place = checkpoint.save(folder / "checkpoints", 2, {}, {"update": 2}, {})
    done = {"status": "finished", "max_update": 2, "stopped_by": "", "pretraining": pretraining}
    (folder / "results.json").write_text(json.dumps(done | SPENT | results))
    return str(place)


def test_cost_of_shared_ancestors_counts_once(tmp_path: Path) -> None:
    """Two runs that started from one: three runs behind what came from both."""
    base = run(tmp_path / "base", None)
    before = lineage_cost.total_cost(lineage_cost.cost_of_ancestors(base), base)
    runs = {str(tmp_path / "base"): SPENT}
    assert before == SPENT | {"words": None, "run": base, "runs": runs}
    parts = [
        lineage_cost.cost_of_ancestors(run(tmp_path / name, before)) for name in ("one", "two")
    ]
    found = lineage_cost.total_cost(lineage_cost.merge_costs(parts), None)
    assert found is not None and found["flops"] == 30 and found["updates"] == 6
    assert sorted(found["runs"]) == [str(tmp_path / name) for name in ("base", "one", "two")]
    assert lineage_cost.total_cost({}, None) is None


def test_words_of_ancestors(tmp_path: Path) -> None:
    """A sum where all have counted, unknown where one, of an earlier version, has not."""
    base = run(tmp_path / "base", None, words_seen=700)
    before = lineage_cost.total_cost(lineage_cost.cost_of_ancestors(base), base)
    assert before is not None and before["words"] == 700
    later = [run(tmp_path / "counted", before, words_seen=0), run(tmp_path / "old", before)]
    found = [
        lineage_cost.total_cost(lineage_cost.cost_of_ancestors(source), source) for source in later
    ]
    assert [total and total["words"] for total in found] == [700, None]
    assert [total and total["flops"] for total in found] == [20, 20]


def test_ancestors_without_costs_by_run_are_refused(tmp_path: Path) -> None:
    broken = run(tmp_path / "a", SPENT | {"run": str(tmp_path / "old")})
    with pytest.raises(MetaseqError, match="results.json.*pretraining.*runs"):
        lineage_cost.cost_of_ancestors(broken)


def test_cost_without_record_is_unknown(tmp_path: Path) -> None:
    """Not a smaller sum, also of what comes later."""
    lost = run(tmp_path / "lost", None)
    (tmp_path / "lost" / "results.json").unlink()
    before = lineage_cost.total_cost(lineage_cost.cost_of_ancestors(lost), lost)
    assert before is not None and before["flops"] is None and before["runs"] is None
    assert lineage_cost.cost_of_ancestors(run(tmp_path / "next", before)) is None
    assert lineage_cost.merge_costs([{"a": SPENT}, None]) is None


@pytest.mark.parametrize(
    "damage",
    [
        [1],
        {"a": 1},
        {"a": {"seconds": 1.0}},
        {"a": SPENT | {"flops": "x"}},
        {"a": SPENT | {"words": "x"}},
    ],
)
def test_damaged_costs(damage: object) -> None:
    with pytest.raises(ValueError, match="costs are not"):
        lineage_cost.check_costs(damage)
