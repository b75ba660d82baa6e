"""Verification of leagues: cheats are found, honest runs come out, hostile code is contained."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import site
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from documents import document_in
from league_plans import in_process
from outcomes import expect_error

from metaseq_lm.cli import main
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import checksum, to_json, with_checksum
from metaseq_lm.league.assembly import LeagueRuns, read_league
from metaseq_lm.referee import containment
from metaseq_lm.referee.audit import audit
from metaseq_lm.referee.comparison import CLOSE, DIFFERENT, EQUAL, LEVEL, compare, compare_means
from metaseq_lm.referee.ledger import _read_ledger, make_ledger, read_place
from metaseq_lm.referee.merge import merge, name_in_league
from metaseq_lm.referee.verify import scored_by_plugin

Line = dict[str, Any]
BUDGET = 1.49e8  # 62 updates of causal, 88 of masked, within 2 %
PLAN: dict[str, Any] = {
    "name": "tiny",
    "data": {
        "world": "quad",
        "world_documents": 400,
        "world_held_out": 100,
        "world_labelled": 64,
        "world_pairs": 8,
    },
    "options": [
        *("model=modern", "model.encoder_layers=1", "model.encoder_embed_dim=16"),
        *("model.encoder_ffn_embed_dim=32", "model.encoder_attention_heads=2"),
        *("task.batch_size=2", "task.tokens_per_sample=40", "task.sample_break_mode=eos"),
        "trainer.validate_interval_updates=20",
    ],
    "objectives": {
        "causal": {"options": ["task=causal_lm", "criterion=causal_lm"]},
        "masked": {"options": ["task=masked_lm", "criterion=masked_lm"], "control": "causal"},
    },
    "budgets": [BUDGET],
    "seeds": [1, 2, 3],
    "tuning": {"grid": {"optimizer.lr": [0.001, 0.003]}, "seeds": [101], "widen": 0},
    "controls": {"untrained": True, "seeds": [51]},
    "comparison": {
        "baseline": "causal",
        "suites": ["probe depth name=depth"],
        "metric": "depth.accuracy",
        "secondary": ["valid.loss"],
        "means": {"labels": ["depth.accuracy", "depth.valid_accuracy"]},
        "smallest_effect": 0.05,
    },
}
FINAL = "final/causal/max_flops=1.49e8-lr="


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan, its archive beside it, and the league's folder L."""
    folder = tmp_path_factory.mktemp("refereed")
    plan = folder / "plan.yaml"
    plan.write_text(yaml.safe_dump(PLAN, sort_keys=False))
    with pytest.MonkeyPatch.context() as monkeypatch:
        in_process(monkeypatch)
        assert main(["league", str(plan), "--out", str(folder / "L")]) == 0
    archive = ["--archive", str(folder / "plan.jsonl.gz")]
    assert main(["league", "report", str(folder / "L"), *archive]) == 0
    return folder


@pytest.fixture
def copied(place: Path, tmp_path: Path) -> Path:
    """A copy of plan and archive."""
    for name in ("plan.yaml", "plan.jsonl.gz"):
        shutil.copyfile(place / name, tmp_path / name)
    return tmp_path


def rewrite(archive: Path, change: Callable[[list[Line]], list[Line] | None]) -> None:
    """Change the runs of an archive, with right checksums."""
    header, *lines = map(json.loads, gzip.decompress(archive.read_bytes()).splitlines())
    lines = change(lines) or lines
    rows = "".join(to_json(line) + "\n" for line in lines).encode()
    header = {key: value for key, value in header.items() if key != "checksum"}
    header |= {"runs": len(lines), "rows": checksum(rows)}
    archive.write_bytes(gzip.compress((to_json(with_checksum(header)) + "\n").encode() + rows))


def of(lines: list[Line], start: str) -> Line:
    return next(line for line in lines if line["name"].startswith(start))


def overall(line: Line) -> Line:
    return line["suites"][0]["groups"]["overall"]


# ---------------------------------------------------------------- cheats that need no training


def accuracy_alone(lines: list[Line]) -> None:
    overall(of(lines, FINAL))["metrics"]["accuracy"] += 0.05


def above_bayes(lines: list[Line]) -> None:
    for line in lines:
        if line["name"].startswith(FINAL):
            group = overall(line)
            line["suites"][0]["references"]["accuracy"]["bayes_left"] = 0.1
            group["hits"] = [group["n"] // 32 + (i < group["n"] % 32) for i in range(32)]
            group["metrics"]["accuracy"] = 1.0


def loss_without_log(lines: list[Line]) -> None:
    of(lines, FINAL)["results"]["metrics"]["valid"]["loss"] -= 0.5


def loss_below_entropy(lines: list[Line]) -> None:
    for line in lines:
        if line["name"].startswith(FINAL):
            for values in (line["results"]["metrics"]["valid"], line["log"][-1]):
                values |= {"loss": 0.1, "next_token": 0.1, "perplexity": 1.105}


def half_of_the_updates(lines: list[Line]) -> None:
    for line in lines:
        if line["name"].startswith("final/causal"):
            line["results"]["updates"] //= 2


def twice_the_flops(lines: list[Line]) -> None:
    of(lines, FINAL)["results"]["flops"] *= 2


def other_model(lines: list[Line]) -> None:
    of(lines, FINAL)["values"]["model.encoder_layers"] = 2


def other_shared_option(lines: list[Line]) -> None:
    of(lines, FINAL)["values"]["task.batch_size"] = 8


def foreign_seed(lines: list[Line]) -> None:
    line = of(lines, FINAL)
    line["name"] = line["name"].rpartition("=")[0] + "=77"
    line["values"]["seed"] = line["results"]["seed"] = 77


def without_the_worst_seed(lines: list[Line]) -> list[Line]:
    runs = [line for line in lines if line["name"].startswith(FINAL)]
    worst = min(runs, key=lambda line: overall(line)["metrics"]["accuracy"])
    return [line for line in lines if line is not worst]


def copy_of_the_best_seed(lines: list[Line]) -> None:
    runs = [line for line in lines if line["name"].startswith(FINAL)]
    best = max(runs, key=lambda line: overall(line)["metrics"]["accuracy"])
    for line in runs:
        seed = line["values"].get("seed")
        line |= json.loads(json.dumps({key: best[key] for key in ("results", "log", "suites")}))
        line["results"]["seed"] = seed


def chosen_tuning_seed(lines: list[Line]) -> None:
    of(lines, "tune/causal")["values"]["seed"] = 1001


def chosen_control(lines: list[Line]) -> None:
    of(lines, "untrained/causal")["values"]["seed"] = 1001


def weaker_untrained_control(lines: list[Line]) -> None:
    of(lines, "untrained/causal")["results"]["parameters"] = {"trained": 10, "all": 10}


def other_items(lines: list[Line]) -> None:
    of(lines, FINAL)["suites"][0]["data"] = "0" * 32


def other_options_of_a_suite(lines: list[Line]) -> None:
    for line in lines:
        for suite in line.get("suites", ()):
            suite["options"]["split"] = "valid"


def no_score(lines: list[Line]) -> None:
    for line in lines:
        if line["name"].startswith("untrained"):
            del line["suites"]


def foreign_objective(lines: list[Line]) -> None:
    of(lines, FINAL)["values"]["label"] = "another"


CHEATS: dict[Callable[..., Any], set[str]] = {
    accuracy_alone: {"numbers"},
    above_bayes: {"gate bound"},
    loss_without_log: {"numbers"},
    loss_below_entropy: {"gate bound", "gate impossible"},
    half_of_the_updates: {"updates"},
    twice_the_flops: {"gate budget"},
    other_model: {"options"},
    other_shared_option: {"options"},
    foreign_seed: {"gate missing"},
    without_the_worst_seed: {"gate missing"},
    copy_of_the_best_seed: {"gate identical runs"},
    chosen_tuning_seed: {"seeds"},
    chosen_control: {"seeds"},
    weaker_untrained_control: {"gate controls"},
    other_items: {"items", "gate suites"},
    other_options_of_a_suite: {"items"},
    no_score: {"items"},
    foreign_objective: {"plan"},
}


def found(folder: Path, place: Path) -> set[str]:
    """Return the names of the checks that complain."""
    return {item.check for item in audit(read_league(folder / "plan.yaml"), place / "L" / "data")}


def test_honest_archive_has_no_complaint(place: Path) -> None:
    assert found(place, place) == set()


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda cheat: cheat.__name__)
def test_cheat_is_found_without_training(
    cheat: Callable[..., Any], copied: Path, place: Path
) -> None:
    rewrite(copied / "plan.jsonl.gz", cheat)
    assert CHEATS[cheat] & found(copied, place)


# ---------------------------------------------------------------- cheats that a repetition finds


def raised_with_its_items(lines: list[Line]) -> None:
    group = overall(of(lines, FINAL))
    group["hits"] = [min(hits + 1, group["n"] // 32) for hits in group["hits"]]
    group["metrics"]["accuracy"] = sum(group["hits"]) / group["n"]


def lower_loss(lines: list[Line]) -> None:
    line = of(lines, FINAL)
    for values in (line["results"]["metrics"]["valid"], line["log"][-1]):
        values["loss"] -= 0.2


def other_weights(lines: list[Line]) -> None:
    line = of(lines, FINAL)
    line["suites"][0]["weights"] = "0" * 64
    raised_with_its_items(lines)
    overall(line)["metrics"]["accuracy"] += 0.2


@pytest.mark.parametrize("cheat", [raised_with_its_items, lower_loss, other_weights])
def test_cheat_is_found_by_a_repetition(
    cheat: Callable[..., Any], copied: Path, place: Path
) -> None:
    rewrite(copied / "plan.jsonl.gz", cheat)
    changed, honest = (read_league(path / "plan.yaml") for path in (copied, place))
    assert set(repeated(honest, place)) == {EQUAL}
    assert [outcome for outcome in repeated(changed, place) if outcome != EQUAL] == [DIFFERENT]


def repeated(league: LeagueRuns, place: Path) -> list[str]:
    """Compare the runs of a league with the folders that they came from."""
    folders = {run: place / "L" / Path(*run.path.parts[-3:]) for run in league.runs}
    return [item.outcome for item in compare(league, folders)]


def test_small_difference_of_weights_is_close(copied: Path, place: Path) -> None:
    def change(lines: list[Line]) -> None:
        line = of(lines, FINAL)
        line["suites"][0]["weights"] = "0" * 64
        line["results"]["metrics"]["valid"]["loss"] += 1e-4
        line["log"][-1]["loss"] += 1e-4

    rewrite(copied / "plan.jsonl.gz", change)
    assert set(repeated(read_league(copied / "plan.yaml"), place)) == {EQUAL, CLOSE}


def test_repetitions_of_another_course_are_compared_with_the_seeds() -> None:
    """Honest rows are called different at the level; four sd in all seeds are found."""
    rng, seeds, tests = np.random.default_rng(1), 8, 3
    limit = LEVEL / tests
    honest = raised = lucky = 0
    for _ in range(4000):
        archived, again = rng.normal(size=seeds), rng.normal(size=2)
        row = compare_means(archived, again, archived)[1]
        alone = [
            compare_means(archived[i : i + 1], again[i : i + 1], archived[2:])[1] for i in (0, 1)
        ]
        honest += min(row, *alone) < limit
        raised += compare_means(archived + 5, again, archived)[1] < limit
        lucky += compare_means([archived[0] + 12], again[:1], archived[1:])[1] < limit
    assert honest < 1.3 * LEVEL * 4000
    assert raised > 0.8 * 4000 and lucky > 0.8 * 4000
    assert compare_means([1, 1], [1], [1, 1])[1] == 1 and compare_means([2, 2], [1], [2, 2])[1] == 0


def test_course_of_a_row_with_its_seeds(copied: Path, place: Path) -> None:
    """Weights differ in all seeds of a row: the spread decides, or, with few, a tolerance."""

    def change(lines: list[Line], by: float) -> None:
        for line in lines:
            if line["name"].startswith(FINAL):
                line["suites"][0]["weights"] = "0" * 64
                for values in (line["results"]["metrics"]["valid"], line["log"][-1]):
                    values["loss"] += by

    for by, expected in ((1e-3, CLOSE), (0.2, DIFFERENT)):
        rewrite(copied / "plan.jsonl.gz", lambda lines: change(lines, by))
        outcomes = repeated(read_league(copied / "plan.yaml"), place)
        assert outcomes.count(expected) == 3 and outcomes.count(EQUAL) == len(outcomes) - 3


# ---------------------------------------------------------------- plans, submissions, ledgers


def test_edited_plan_has_no_runs(copied: Path) -> None:
    plan = copied / "plan.yaml"
    plan.write_text(plan.read_text().replace("smallest_effect: 0.05", "smallest_effect: 0.01"))
    with pytest.raises(UsageError, match="no runs of"):
        raise_of(["verify", plan, "--rows", 0, "--out", copied / "V"])


def raise_of(words: list[object]) -> None:
    """Run a word of `league`, raising its error."""
    from metaseq_lm.cli import build_parser

    args = build_parser("league").parse_args(["league", *map(str, words)])
    args.overrides, args.argv = [], []
    args.module.run(args)


def league_with(place: Path, objective: str, decay: float) -> Path:
    """Return a league's folder with an added objective, made beside `place`."""
    out = place.parent / objective
    words = ["league", str(place / "plan.yaml"), "--out", str(out), "--name", objective]
    words += ["--with", "task=masked_lm", "criterion=masked_lm", f"optimizer.weight_decay={decay}"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        in_process(monkeypatch)
        assert main(words) == 0
    return out


@pytest.fixture(scope="module")
def two(place: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two leagues of the plan in parallel, each with an objective of its own."""
    here = tmp_path_factory.mktemp("two") / "base"
    here.mkdir()
    for name in ("plan.yaml", "plan.jsonl.gz"):
        shutil.copyfile(place / name, here / name)
    return [league_with(here, f"masked_{decay}", decay / 100) for decay in (20, 30)]


def test_leagues_of_one_plan_are_merged_and_verified(
    two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.yaml"
    shutil.copyfile(two[0].parent / "base" / "plan.yaml", plan)
    merged = ["league", "merge", *map(str, two), "--archive", str(tmp_path / "plan.jsonl.gz")]
    capsys.readouterr()
    assert main([*merged, "--json"]) == 0
    assert document_in(capsys.readouterr().out, "merged")["added"] == ["masked_20", "masked_30"]
    league = read_league(plan)
    assert {row.objective for row in league.rows()} == {
        "causal",
        "masked",
        "masked_20",
        "masked_30",
    }
    assert league.plan.comparisons == 3
    words = ["verify", str(plan), "--rows", "0", "--out", str(tmp_path / "V")]
    assert main(["league", *words, "--json"]) == 0
    assert document_in(capsys.readouterr().out, "verification")["verified"]


def test_conflicts_are_refused(two: list[Path], place: Path, tmp_path: Path) -> None:
    shutil.copytree(two[0].parent / "base", tmp_path / "other")
    rewrite(tmp_path / "other" / "plan.jsonl.gz", accuracy_and_log)
    out = ["--archive", str(tmp_path / "merged.jsonl.gz")]
    places = [str(place / "plan.yaml"), str(tmp_path / "other" / "plan.yaml")]
    assert main(["league", "merge", *places, *out]) == 2
    assert not (tmp_path / "merged.jsonl.gz").exists()


def test_last_bits_of_data_are_those_of_the_processor(place: Path) -> None:
    league = read_league(place / "plan.yaml")
    assert league.corpus
    for factor in (1 + 1e-15, 1 + 1e-6):
        corpus = replace(league.corpus, unigram=league.corpus.unigram * factor)
        assert corpus != league.corpus
        leagues = [league, replace(league, corpus=corpus)]
        if factor < 1 + 1e-9:
            assert merge(leagues, ["A", "B"]).runs == league.runs
        else:
            with pytest.raises(UsageError, match="B: .*other data"):
                merge(leagues, ["A", "B"])


def accuracy_and_log(lines: list[Line]) -> None:
    line = of(lines, FINAL)
    line["results"]["metrics"]["valid"]["loss"] += 1.0


def test_ledger_by_its_page(
    two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = tmp_path / "ledger"
    assert main(["league", "ledger", str(ledger), str(two[0].parent / "base" / "plan.yaml")]) == 0
    for out in two:
        name = out.name
        words = ["submit", str(out), "--name", name, "--out", str(ledger / "submissions" / name)]
        capsys.readouterr()
        assert main(["league", *words, "--json"]) == 0
        assert document_in(capsys.readouterr().out, "submission")["missing"] == []
    assert main(["league", "report", str(ledger)]) == 0
    table = (ledger / "README.md").read_text()
    assert "| masked_20 |" in table and "| masked_30 |" in table
    file = ledger / "submissions" / "masked_20" / "plan.yaml"
    file.write_text(file.read_text().replace("0.05", "0.01"))
    with pytest.raises(MetaseqError, match="masked_20.* not as"):
        _read_ledger(ledger)


def test_seeds_of_a_ledger_follow_from_its_number(copied: Path, tmp_path: Path) -> None:
    (copied / "plan.jsonl.gz").unlink()
    ledger = tmp_path / "ledger"
    record = make_ledger(ledger, copied / "plan.yaml")
    assert _read_ledger(ledger).plan.ladder.seeds != (1, 2, 3)
    content = json.loads((ledger / "ledger.json").read_text())
    content["number"] += 1
    del content["checksum"]
    (ledger / "ledger.json").write_text(json.dumps(with_checksum(content)))
    with pytest.raises(MetaseqError, match=str(record["registered"])):
        _read_ledger(ledger)


def test_attempt_is_registered_before_its_runs(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger, plugin = tmp_path / "ledger", tmp_path / "registered_attempt.py"
    make_ledger(ledger, copied / "plan.yaml")
    plugin.write_text("")
    sent = str(ledger / "submissions" / "mine")
    words = ["submit", str(ledger / "plan.yaml"), "--name", "mine", "--out", sent]
    added = ["--with", "criterion=masked_lm", "task.mask_prob=0.25", "--user-dir", str(plugin)]
    assert main(["league", *words, *added]) == 0
    assert (Path(sent) / "plugin" / plugin.name).is_file()
    planned = read_league(copied / "plan.yaml").plan.comparisons
    assert _read_ledger(ledger).plan.comparisons == planned + 1
    capsys.readouterr()
    assert main(["league", "submit", sent, "--json"]) == 1
    missing = document_in(capsys.readouterr().out, "submission")["missing"]
    assert [item["check"] for item in missing] == ["runs"]
    plugin.write_text("changed = True")
    for others in (["--with", "criterion=masked_lm"], added):
        expect_error(capsys, main(["league", *words, *others]), 2, sent, "another attempt")
    for unknown in ("no_such", "electric_nce"):  # which is for another task
        code = main(["league", *words, "--with", f"criterion={unknown}"])
        expect_error(capsys, code, 2, "mine", unknown)
    code = main(["league", "submit", str(copied), *words[2:], "--with", "criterion=masked_lm"])
    expect_error(capsys, code, 2, str(copied), "plan")
    code = main(["league", *words, "--grid", "optimizer.lr=1,2"])
    expect_error(capsys, code, 2, "--grid", "--with")


def test_check_of_a_ledger_names_the_plug_in(copied: Path, tmp_path: Path) -> None:
    make_ledger(tmp_path / "ledger", copied / "plan.yaml")
    program = tmp_path / "bin" / "metaseq-lm"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    command = [tmp_path / "ledger" / "check", "submissions/mine"]
    commands = []
    for plugin in ("", "submissions/mine/plugin/mine.py"):
        (tmp_path / "ledger" / plugin).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "ledger" / plugin).touch()
        commands.append(subprocess.check_output(command, env=environment, text=True).splitlines())
    verify = "league verify submissions/mine --rows 2"
    assert commands[0] == ["league submit submissions/mine", f"{verify} --out verified/mine"]
    assert commands[1][1] == f"{verify} --user-dir {plugin} --out verified/mine"


def test_attempts_count_without_runs_and_have_a_quota(two: list[Path]) -> None:
    contents = read_league(two[0]).contents
    assert contents.extended.comparisons == 2
    comparison = replace(contents.plan.comparison, attempts=0)
    with pytest.raises(UsageError, match="masked_20"):
        _ = replace(contents, plan=replace(contents.plan, comparison=comparison)).extended


# ---------------------------------------------------------------- code of others

HOSTILE = '''
import json, os, socket, subprocess, sys
from pathlib import Path
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions.masked_lm import MaskedLM

def outcome(action):
    try:
        action()
    except Exception as error:
        return type(error).__name__
    return "done"

answers = {
    "tcp": outcome(lambda: socket.create_connection(("127.0.0.1", PORT), timeout=1)),
    "udp": outcome(lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"", ("8.8.8.8", 53))),
    "write": outcome(lambda: Path("OUTSIDE/written").write_text("")),
    "secret": outcome(lambda: Path("OUTSIDE/secret").read_text()),
    "environment": "done" if "MY_SECRET" in os.environ else "nothing",
    "others": outcome(lambda: Path(f"/proc/{os.getppid()}/environ").read_text()),
    "signal": outcome(lambda: os.kill(os.getppid(), 0)),
    "fork": outcome(lambda: subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)", "left-by-hostile-code"],
        start_new_session=True)),
}
Path(os.environ["HOME"], "answers").write_text(json.dumps(answers))

@register_criterion("hostile")
class Hostile(MaskedLM):
    """Masked LM that does something else, too."""
'''


@pytest.fixture
def listener() -> Iterator[int]:
    """The port of a server."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.skipif(not containment.is_possible(), reason="no process can be contained here")
def test_hostile_code_is_contained(
    tmp_path: Path, listener: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "own"
    outside.mkdir()
    folder.mkdir()
    (outside / "secret").write_text("secret")
    monkeypatch.setenv("MY_SECRET", "secret")
    text = HOSTILE.replace("OUTSIDE", str(outside)).replace("PORT", str(listener))
    (tmp_path / "hostile.py").write_text(text)
    code = "from metaseq_lm import plugins; plugins.load_all(sys.argv[1])"
    plugin = tmp_path / "hostile.py"
    assert containment.run(code, [str(plugin)], folder, [plugin], tmp_path / "log") == 0
    answers = json.loads((folder / "answers").read_text())
    assert answers.pop("fork") == "done" and "done" not in answers.values(), answers
    assert not (outside / "written").exists()
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(b"left-by-hostile-code" in line for line in running)


@pytest.mark.skipif(not containment.is_possible(), reason="no process can be contained here")
@pytest.mark.parametrize("linked", ["package", "package/__init__.py", "of/name/__init__.py", None])
def test_installed_packages_may_be_links(
    linked: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in environments that installers make of one store of packages."""
    for name in ("store/package", "site/package", "site/of/name", "own"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("content", "package/content", "__init__.py"):
        (tmp_path / "store" / name).write_text("")
    if linked == "package":
        (tmp_path / "site" / linked).rmdir()
    if linked:
        (tmp_path / "site" / linked).symlink_to(tmp_path / "store" / Path(linked).name)
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path / "site")])
    folder = linked if linked == "package" else ""
    words = [str(tmp_path / "store" / folder / "content")]
    code = containment.run("open(sys.argv[1])", words, tmp_path / "own", [], tmp_path / "log")
    assert (code == 0) == bool(linked)


PLUG_IN = '''
import contextlib, os
from pathlib import Path
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions.masked_lm import MaskedLM

@register_criterion("same_masked_lm")
class Same(MaskedLM):
    """Masked LM under another name."""

if Path.cwd().name == "runs":
    with contextlib.suppress(OSError):
        Path("leaked").write_text(Path("SECRET").read_text())
'''


@pytest.mark.skipif(not containment.is_possible(), reason="no process can be contained here")
def test_plug_in_is_verified_and_scored_without_it(copied: Path, tmp_path: Path) -> None:
    secret = copied / "beside_the_plan"
    secret.write_text("secret")
    (tmp_path / "same_masked.py").write_text(PLUG_IN.replace("SECRET", str(secret)))
    out, sent, again = (tmp_path / name for name in ("L", "submission", "V"))
    words = ["league", str(copied / "plan.yaml"), "--out", str(out), "--name", "same"]
    words += ["--user-dir", str(tmp_path / "same_masked.py")]
    words += ["--with", "task=masked_lm", "criterion=same_masked_lm"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        in_process(monkeypatch)
        assert main([*words, "--grid", "optimizer.lr=0.003"]) == 0
    assert main(["league", "submit", str(out), "--name", "same", "--out", str(sent)]) == 0
    words = ["league", "verify", str(sent), "--out", str(again), "--rows", "1", "--seed", "1"]
    assert main(words) == 2  # the plug-in has to be named
    assert main([*words, "--user-dir", str(sent / "plugin" / "same_masked.py")]) == 0
    record = json.loads((again / "verified.jsonl").read_text())
    assert {item["outcome"] for item in record["repetitions"]} == {EQUAL}
    assert not (again / "runs" / "leaked").exists()
    phases = [item["run"].split("/")[0] for item in record["repetitions"]]
    assert phases == ["untrained", "tune", "final", "final"]
    # As a plug-in would that changes what scores it.
    folders = {run: again / "runs" / name_in_league(run) for run in read_place(sent).runs}
    for file in again.glob("runs/final/*/*/suites/depth/*.json"):
        content = {k: v for k, v in json.loads(file.read_text()).items() if k != "checksum"}
        content["groups"]["overall"]["metrics"]["accuracy"] += 0.1
        file.write_text(json.dumps(with_checksum(content)))
    found = list(scored_by_plugin(read_place(sent), folders, again / "data", again))
    assert [item.check for item in found] == ["plug-in", "plug-in"]
