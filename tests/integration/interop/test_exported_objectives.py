"""Each built-in objective, trained and exported: the right class or a reason, as the page says."""

import json
import re
from pathlib import Path

import battery
import pytest

from metaseq_lm.cli import main
from metaseq_lm.core.registry import ALL, CRITERIONS
from metaseq_lm.criterions import Exported

pytest.importorskip("transformers")

PAGE = battery.ROOT / "docs" / "reference" / "exports.md"
# The first of each criterion, and what decides in others: the task, or an option.
CASES = [*battery.FIRST, ("masked_lm", 1), ("masked_lm", 3), ("masked_lm", 4)]
CASES += [("squad", 1), ("electra_rtd", 2)]
# Which the page does not have.
PLUG_INS = {
    "span_boundary": "task span_masking (of user_dir.task) does not say",
    "next_latent": "`...LMHeadModel`, text-generation",
    "joint_embedding": "`...ForMaskedLM`, fill-mask",
}
OMITTED = {"next_latent": "dynamics", "joint_embedding": "average, predictor"}
DECISIVE = ("task.joint", "criterion.contrast")


def rows_of_the_page() -> list[str]:
    """Return the rows of the table, with the reasons that are listed below it in their places."""
    page = PAGE.read_text(encoding="utf-8")
    for name, reason in re.findall(r"^\* (reason \d): (.*)$", page, re.MULTILINE):
        page = page.replace(f"| {name} |", f"| {reason} |")
    return [line for line in page.splitlines() if line.startswith("| `")]


def row_of(case: battery.Case, data: Path, place: Path, capsys: pytest.CaptureFixture) -> str:
    """Train one update of a case, export and check it; return its row of the page."""
    run, out = place / "run", place / "out"
    more = ["trainer.max_update=1", "trainer.valid_split=''"]
    config = battery.configure(data, run, case, *more)
    if hasattr(config.model, "encoder_normalize_before"):
        more.append("model.encoder_normalize_before=false")
    battery.train_uncounted(battery.configure(data, run, case, *more))
    capsys.readouterr()
    words = ["export", str(run), "--out", str(out), "--check"]
    words += ["--head", "pairs"] * (config.task._name in ("bam", "meta_pretrain_pairs"))
    words += ["--user-dir", str(battery.ROOT / "user_dir")]
    status, shown = main(words), capsys.readouterr()
    options = [o for o in battery.CASES[case[0]][case[1]] if o.startswith(DECISIVE)]
    objective = f"`{case[0]}` | {', '.join(f'`{o}`' for o in (config.task._name, *options))}"
    if status:
        (error,) = shown.err.splitlines()
        assert status == 1 and not out.exists()
        return f"| {objective} | {error.split('update_000000001: ', 1)[1]} |"
    assert "losses differ by" in shown.out
    if heads := OMITTED.get(case[0]):
        assert f": without {heads}, which criterion {case[0]} does not export\n" in shown.out
    name = json.loads((out / "config.json").read_text())["architectures"][0]
    (pipeline,) = [
        line.removeprefix("pipeline_tag: ")
        for line in (out / "README.md").read_text().splitlines()
        if line.startswith("pipeline_tag: ")
    ] or ["no pipeline"]
    return f"| {objective} | `{name.replace('Bert', '...')}`, {pipeline} |"


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def test_the_page_says_what_becomes_of_it(case, moons, tmp_path, capsys):
    row = row_of(case, moons, tmp_path, capsys)
    if battery.plug_in_of(case) is None:
        assert row in rows_of_the_page(), row
    else:
        assert PLUG_INS[case[0]] in row


def test_the_page_has_each_criterion_and_no_other():
    rows = rows_of_the_page()
    built_in = {n for n, e in CRITERIONS.entries.items() if e.is_of_package}
    assert {row.split("`")[1] for row in rows} == built_in
    assert len(rows) == len(CASES) - len(PLUG_INS)


def test_declarations_stand_in_the_classes_themselves():
    """An inherited one does not count, so a built-in class that has one names it in its body."""
    for kind in ("task", "criterion", "model"):
        built_in = [e for e in ALL[kind].entries.values() if e.is_of_package]
        for entry in built_in:
            inherited = getattr(entry.value, "exported", None)
            own = vars(entry.value).get("exported")
            assert own is None or isinstance(own, (str, bool, Exported)), entry.name
            assert inherited in (None, False) or own is not None, entry.name
