"""The scripts of the examples run to their end, and every command in them has options that go
together.

But those that make data. In place of `python` stands a program that writes down its arguments. What
the scripts find is empty. They are those of a copy that an installation without extras has made,
which also starts the commands.
"""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from bare import environment
from imported import imported
from sweeping import wait_until

from metaseq_lm.core.errors import NO_HINTS
from metaseq_lm.league.plan_files import BALANCED, read_plan

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
PYTHON = '#!/usr/bin/env bash\nprintf "%s\\0" "$@" $\'\\036\' >> "$CALLS"\n'
# What the scripts ask the environment for.
ASKED = ("SHARES", "STAGES", "ENCODER", "FLOPS", "SIZES", "OBJECTIVES", "UPDATES", "JOBS")
DATA = {
    "bam": ["data"],
    "cvt": [f"data/{name}" for name in ("general", "ncbi", "multi30k", "iwslt", "cifar")],
    "meta_pretrain": ["data"],
    "meta_pseudo_label": ["data"],
    "real_encoder": ["data"],
    "tartan": ["data"],
}
# How a command ends whose files are not there.
MISSING = ("no such", "no runs found", "no tokenizer here", "metaseq-lm[transformers]")


def calls_of(script: Path, out: Path) -> list[list[str]]:
    """Return the arguments of each call of python by a script, all of which "succeed"."""
    variables = {"METASEQ_LM_DATA": str(out), "SEEDS": "1", "PEER": "1"}
    variables |= {"METASEQ_LM_MINILM": str(out / "weights")}
    # Of BAM all stages, of which it would find the folders.
    stages = yaml.safe_load((EXAMPLES / "bam" / "sweep.yaml").read_text())["stages"]
    for stage in stages:
        (out / "runs" / stage["name"].replace("{set}", "RTE")).mkdir(parents=True)
    return recorded(script, out, variables)


def recorded(script: Path, out: Path, variables: dict[str, str]) -> list[list[str]]:
    """Return the arguments of each call of python by a script, run with further `variables`."""
    programs, record = out / "programs", out / "calls"
    programs.mkdir(parents=True)
    (programs / "python").write_text(PYTHON)
    (programs / "python").chmod(0o755)
    variables |= {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "CALLS": str(record)}
    others = {key: value for key, value in os.environ.items() if key not in ASKED}
    done = subprocess.run(
        ["bash", str(script), str(out)], env=others | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    calls = record.read_text().split("\036\0")[:-1]
    return [call.split("\0")[:-1] for call in calls]


@pytest.mark.parametrize(
    "name",
    # That of cvt takes a minute; test_examples.py composes its sweeps.
    [pytest.param(name, marks=[pytest.mark.exhaustive] * (name == "cvt")) for name in sorted(DATA)],
)
def test_each_command_of_a_script_has_valid_options(name, tmp_path, bare):
    """Configs and sweeps compose; of the others the files alone are missing."""
    for folder in DATA[name]:
        (tmp_path / "out" / folder).mkdir(parents=True)
    calls = calls_of(bare.copy / "examples" / name / "run.sh", tmp_path / "out")
    kinds = set()
    for call in calls:
        if call[:2] != ["-m", "metaseq_lm"]:
            assert Path(call[0]).is_file(), call
            continue
        kinds.add(call[2])
        more = {"sweep": ["--dry-run"], "train": ["--print-config"]}.get(call[2], [])
        code, shown = bare.run(["metaseq-lm", *call[2:], *more], tmp_path)
        if more:
            assert code == 0 and ("metaseq-lm train" in shown or call[2] == "train"), (call, shown)
        else:
            assert code in (1, 2) and any(word in shown for word in MISSING), (call, shown)
    assert {"report"} <= kinds and kinds & {"sweep", "train"}


def test_the_quickstart_is_a_part_of_the_plan_balanced(tmp_path, bare):
    """In a copy, where the package is installed."""
    calls = recorded(bare.copy / "scripts" / "quickstart", tmp_path / "out", {})
    assert calls[0] == ["-c", "import metaseq_lm"]
    (command,) = calls[1:]
    assert command[:3] == ["-m", "metaseq_lm", "league"] and str(tmp_path / "out") in command
    plan, _ = read_plan(EXAMPLES / "league" / "quickstart.yaml")
    assert len(plan.objectives) * len(plan.ladder.budgets) * len(plan.ladder.seeds) == 20
    whole, _ = read_plan(BALANCED)
    of_plan = {objective.name: objective for objective in whole.objectives}
    for objective in plan.objectives:
        of_whole = replace(of_plan[objective.name], control=objective.control)
        assert objective == of_whole
    assert set(plan.comparison.suites) < set(whole.comparison.suites)
    assert plan.comparison.kinds == whole.comparison.kinds


@pytest.mark.slow
def test_the_quickstart_trains_in_a_copy(tmp_path, bare):
    """Without extras and with nothing installed but the wheel, until the first run has begun."""
    path = f"{bare.programs}{os.pathsep}{os.environ['PATH']}"
    with open(tmp_path / "output", "w") as output:
        started = subprocess.Popen(
            ["bash", "scripts/quickstart", tmp_path / "out"],
            cwd=bare.copy,
            env=environment() | {"PATH": path},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        # os.walk goes on where a folder that it has listed was renamed.
        logged = lambda: any("log.jsonl" in files for _, _, files in os.walk(tmp_path / "out"))
        wait_until(lambda: started.poll() is not None or logged())
        assert started.poll() is None, (tmp_path / "output").read_text()
    finally:
        os.killpg(started.pid, signal.SIGTERM)
        started.wait()


@pytest.mark.parametrize(
    "words, extra",
    [
        (["scripts/benchmarks", "--quick"], "transformers"),
        (["examples/real_encoder/untrained.py", "hf", "out"], "transformers"),
        (["examples/real_encoder/peer.py", "run", "--source=hf", "--out=o"], "transformers"),
        (
            "examples/real_encoder/exported.py run --source . --out out --results r.jsonl".split(),
            "transformers",
        ),
        (
            "examples/suites/against_others.py --causal run --suite blimp=. --pipeline .".split(),
            "compare",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_programs_name_the_extra_that_they_need(words, extra, bare):
    code, text = bare.run(["python", *words], bare.copy)
    assert code in (1, 2) and f"metaseq-lm[{extra}]" in text and "Traceback" not in text


def test_scripts_that_train_ask_for_no_hints():
    scripts = {path.parent.name: path.read_text() for path in EXAMPLES.glob("*/run.sh")}
    training = {name for name, text in scripts.items() if " train " in text}
    assert training == {name for name, text in scripts.items() if NO_HINTS in text}


def test_every_example_script_is_tested():
    assert {path.parent.name for path in EXAMPLES.glob("*/run.sh")} == set(DATA)


@pytest.mark.parametrize("name", ["peer", "exported"])
def test_the_tables_of_the_real_encoder_need_no_transformers(name, monkeypatch, capsys):
    """They are made of lines of JSON."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    example = EXAMPLES / "real_encoder"
    results = example / "measured" / f"{name}.jsonl"
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--table", str(results)])
    imported(example / f"{name}.py").main()
    assert capsys.readouterr().out.startswith("| set |")
