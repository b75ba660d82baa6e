"""Files made to do harm are refused in one message, run nothing, and cost no memory."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import malice
import malicious_cases
import pytest
import torch
from battery import CASES, TINY
from real_runs import Started
from synthetic import make_run

from metaseq_lm.cli import main
from metaseq_lm.reporting.folders import find_runs
from metaseq_lm.runs import checkpoint
from metaseq_lm.runs.manifests import CheckpointError
from metaseq_lm.sweeps.definition import normalise
from metaseq_lm.sweeps.expansion import expand
from metaseq_lm.sweeps.folder import SweepFolder
from metaseq_lm.sweeps.job import code_at

MLM = [*CASES["masked_lm"][0], *TINY, "trainer.max_update=1"]
SECRET = "hunter2-of-the-test"


@pytest.fixture(scope="module")
def outcomes(moons: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """What the commands did with each case, from a process of their own."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak memory is read from Linux's /proc")
    place = tmp_path_factory.mktemp("malice")
    done = subprocess.run(
        [sys.executable, malicious_cases.__file__, str(place), str(moons)],
        capture_output=True,
        text=True,
        env=os.environ | {"METASEQ_LM_TEST_SECRET": SECRET, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[dict]] = {}
    for line in done.stdout.splitlines():
        if line.startswith('{"case"'):
            told = json.loads(line)
            found.setdefault(told["case"], []).append(told)
    return found


@pytest.mark.parametrize(
    "name, commands", [(name, commands) for name, _, commands in malicious_cases.CASES]
)
def test_malicious_file_is_refused(outcomes, name, commands):
    assert [told["command"] for told in outcomes[name]] == [c.split()[0] for c in commands]
    for told in outcomes[name]:
        assert told["code"] in (1, 2), told
        assert not told["canary"]
        assert "Traceback" not in told["stderr"] and SECRET not in told["stderr"] + told["stdout"]
        messages = told["stderr"].count("metaseq-lm: ")
        assert messages == (0 if told["command"] == "doctor" else 1), told["stderr"]
        assert len(told["stderr"]) < 3000
        assert told["grown"] <= 2 * told["size"] + 200e6, told
        assert told["seconds"] < 30


def test_payload_runs_where_pickles_are_trusted(tmp_path, monkeypatch):
    """Each payload does what it threatens if its pickle is trusted: else the tests say nothing."""
    canary = tmp_path / "canary"
    (tmp_path / "evil_module.py").write_text(malice.MODULE.format(canary=str(canary)))
    (tmp_path / "evil_class.py").write_text(malice.CLASS.format(canary=str(canary)))
    monkeypatch.syspath_prepend(str(tmp_path))
    makers = [malice.system, malice.evaluated, malice.executed, malice.process]
    makers += [malice.module_run, malice.module_import, malice.with_setstate, malice.object_array]
    for make in makers:
        torch.save({"x": make(canary)}, tmp_path / "evil.pt")
        canary.unlink(missing_ok=True)
        sys.modules.pop("evil_module", None)
        torch.load(tmp_path / "evil.pt", weights_only=False)
        assert canary.exists(), make.__name__
    for name in ("evil_module", "evil_class"):
        sys.modules.pop(name, None)


def test_checkpoint_save_refuses_what_load_would_refuse(tmp_path):
    with pytest.raises(CheckpointError, match="be saved: .*bytearray"):
        checkpoint.save(tmp_path, 1, {"w": torch.ones(1)}, {"x": bytearray(3)}, {})
    assert not list(tmp_path.iterdir())


def test_plain_data_of_every_kind_can_be_loaded(tmp_path):
    kinds = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64]
    state: dict[str, Any] = {str(kind): torch.ones(2).to(kind) for kind in kinds}
    state |= {"n": [1, 2.5, None, True, "x", b"x", (1, 2**80)], "set": {1}, "empty": {}}
    state |= {"size": torch.Size([2]), "type": torch.float32, "uint16": torch.tensor([1]).short()}
    path = checkpoint.save(tmp_path, 1, {"w": torch.ones(1)}, state, {})
    assert str(checkpoint.load(path).state) == str(state)


def test_links_in_a_run_folder_are_removed_and_not_followed(tmp_path):
    """A link called like a checkpoint or a leftover: what it leads to stays."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").write_text("x")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in (".tmp-update_000000009", "update_000000001", "update_000000005"):
        (folder / name).symlink_to(precious)
    for update in (4, 5, 6):
        checkpoint.save(folder, update, {"w": torch.ones(1)}, {"x": 1}, {})
        checkpoint.prune(folder, 2, update)
    found, _ = checkpoint.find_newest(folder)
    assert found is not None and found.path.name == "update_000000006"
    assert sorted(p.name for p in folder.iterdir()) == [
        "last",
        "update_000000005",
        "update_000000006",
    ]
    assert (precious / "thesis").read_text() == "x"


@pytest.mark.parametrize("target", ["/", "/proc", "outside", "above"])
def test_report_follows_no_link_out_of_its_folder(tmp_path, target, capsys):
    """Except one to a run; the link is named."""
    runs, outside = tmp_path / "runs", tmp_path / "outside"
    make_run(runs / "a")
    make_run(outside / "b", seed=2)
    place = {"outside": outside, "above": tmp_path}.get(target, Path(target))
    (runs / "link").symlink_to(place)
    started = time.process_time()
    assert main(["report", str(runs), "--format", "csv"]) == 0
    shown = capsys.readouterr()
    assert time.process_time() - started < 10
    assert len(shown.out.splitlines()) == 2
    assert f"{runs}/link leads to {place}" in shown.err
    (runs / "run").symlink_to(outside / "b")
    assert len(find_runs([runs])) == 2


@pytest.mark.parametrize("name", ["sweep.json", "jobs.jsonl", ".lock", "log.jsonl", "results.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "outside"])
def test_sweep_reads_and_writes_only_files_of_its_folder(moons, tmp_path, name, kind):
    out, outside = tmp_path / "out", tmp_path / "outside"
    definition = normalise({"data": str(moons), "overrides": MLM})
    out.mkdir()
    SweepFolder(out).adopt(definition, expand(definition, out), {})
    (out / "seed=1").mkdir()
    file = (out / "seed=1" if name in ("log.jsonl", "results.json") else out) / name
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero" if kind == "device" else outside)
    for command in (["status"], ["cancel"], ["report"]):
        words = ["report", str(out)] if command == ["report"] else ["sweep", *command, str(out)]
        run = Started(words, tmp_path / "output")
        assert run.wait(60) in (0, 1, 2) and "Traceback" not in run.text(), run.text()
    assert not outside.exists()


FORMULAS = ["=HYPERLINK(0)", "+1+1", "-cmd|' /C calc'!A0", "@SUM(1)", "\t=1", "\r=1", " =1", "＝1"]
COLOURED = "\x1b[31mred\x1b]0;title\x07\u202e"


def test_reports_defuse_formulas_and_control_characters(tmp_path, capfd):
    """In every file and on the terminal; numbers stay numbers."""
    labels = [*FORMULAS, COLOURED, "soft", "-0.5"]
    for seed, label in enumerate(labels):
        make_run(tmp_path / "runs" / str(seed), 0.5, seed=seed, label=label, **{COLOURED: label})
    out = tmp_path / "report"
    words = ["report", str(tmp_path / "runs"), "--out", str(out)]
    assert main([*words, "--curve", "valid.accuracy"]) == 0
    printed = capfd.readouterr()
    texts = [printed.out, printed.err]
    texts += [path.read_text() for path in out.iterdir() if path.suffix != ".png"]
    assert len(texts) == 7
    for text in texts:
        assert all(c.isprintable() or c == "\n" for c in text), text
    rows = list(csv.reader((out / "table.csv").open()))
    cells = [cell for row in rows for cell in row]
    assert not [c for c in cells if re.match(r"\s*[=+@＝-]", c) and c != "-0.5"], cells
    assert {"'=HYPERLINK(0)", "soft", "-0.5", "0.5"} <= set(cells)


def test_terminal_gets_no_control_characters_of_files(moons, tmp_path, capfd):
    data = shutil.copytree(moons, tmp_path / "data")
    labels = (COLOURED, "x", COLOURED, "x")
    rows = [f"{'many words ' * 60}{i}\t{label}\n" for i, label in enumerate(labels)]
    (tmp_path / "set.tsv").write_text("text\tlabel\n" + "".join(rows))
    file = tmp_path / "set.tsv"
    words = ["--labelled", "odd", "--trainpref", str(file), "--validpref", str(file)]
    main(["preprocess", *words, "--destdir", str(data)])
    main(["doctor", str(data)])
    definition = normalise({"data": str(moons), "overrides": MLM})
    out = tmp_path / "out"
    out.mkdir()
    SweepFolder(out).adopt(definition, expand(definition, out), {})
    rewrite(out / "sweep.json", lambda content: content["runs"][0].update(name=COLOURED))
    assert main(["sweep", "status", str(out)]) == 0
    rewrite(out / "sweep.json", lambda content: content.update(out=COLOURED))
    assert main(["sweep", "resubmit", "--failed", str(out)]) == 1
    printed = capfd.readouterr()
    assert printed.out.count("red") >= 3
    for text in printed:
        assert all(c.isprintable() or c in "\n\t" for c in text), text


PLUGIN = "from pathlib import Path\nPath({canary!r}).write_text('imported')\n"


@pytest.fixture
def planted(moons: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A run folder whose config.yaml and checkpoint name a plug-in, and the plug-in's canary."""
    run, canary, plugin = tmp_path / "run", tmp_path / "canary", tmp_path / "evil_plugin.py"
    assert main(["train", str(moons), "--save-dir", str(run), *MLM]) == 0
    plugin.write_text(PLUGIN.format(canary=str(canary)))
    config = (run / "config.yaml").read_text()
    assert "user_dir: null" in config
    (run / "config.yaml").write_text(config.replace("user_dir: null", f"user_dir: {plugin}"))
    manifest = run / "checkpoints/last/manifest.json"
    content = json.loads(manifest.read_text())
    content["config"]["user_dir"] = str(plugin)
    manifest.write_text(json.dumps(content))
    (run / "sweep.yaml").write_text(f"user_dir: {plugin}\n")
    load = f"metaseq_lm.plugins.load, name_or_path: {plugin}"
    hydras = {
        "callbacks": f"callbacks: {{evil: {{_target_: {load}}}}}",
        "logging": f"hydra_logging: {{handlers: {{evil: {{(): {load}}}}}}}",
    }
    for name, text in hydras.items():
        (run / name).mkdir()
        (run / name / "config.yaml").write_text(f"defaults: [base, _self_]\nhydra: {{{text}}}\n")
    return run, canary


@pytest.mark.parametrize(
    "command, code",
    [
        ("report {run}", 0),
        ("report {run} --where user_dir=evil_plugin", 2),
        ("evaluate {run} --split valid", 2),
        ("train {data} --save-dir {run} trainer.max_update=2", 0),
        ("train {data} --save-dir {run}2 --init-from {run}", 0),
        ("train {data} --save-dir {run}3 --config-dir {run}", 2),
        ("train {data} --save-dir {run}5 --config-dir {run}/callbacks trainer.max_update=2", 0),
        ("train {data} --save-dir {run}6 --config-dir {run}/logging trainer.max_update=2", 0),
        ("train {data} --save-dir {run}4 user_dir={run}/../evil_plugin.py", 2),
        ("train {data} --config-dir {run}/callbacks --print-config", 0),
        ("train {data} --config-dir {run}/logging --print-config", 0),
        ("sweep {run}/sweep.yaml {data} --out {run}8 --dry-run", 2),
        ("sweep {data} --out {run}8 --dry-run user_dir={run}/../evil_plugin.py", 2),
        ("sweep {data} --out {run}8 --dry-run --config-dir {run}", 2),
    ],
)
def test_code_is_loaded_only_by_the_command_line(planted, moons, command, code, capsys):
    """A plug-in that a found file names is not imported; evaluate wants it repeated."""
    run, canary = planted
    words = command.format(run=run, data=moons).split()
    if "--config-dir" in words:
        words += ["--config-name", "config"]
    if words[0] == "train" and ("--config-dir" not in words or not code):
        given = {word.split("=")[0] for word in words}
        words += [w for w in MLM if w.split("=")[0] not in given]
    capsys.readouterr()
    assert main(words) == code, capsys.readouterr().err
    said = capsys.readouterr().err
    assert not canary.exists() and "Traceback" not in said
    assert "evil_plugin" not in sys.modules
    if words[0] in ("train", "sweep") and code:
        assert any(text in said for text in ("plug-in is", "not inside of", "give --user-dir")), (
            said
        )
    if words[0] == "evaluate":
        assert "give --user-dir" in said and "evil_plugin.py" in said
        assert main([*words, "--user-dir", str(run.parent / "evil_plugin.py")]) == 0
        assert canary.exists()
        del sys.modules["evil_plugin"]


# ------------------------------------------------------------------------ sweeps


@pytest.fixture
def failed_sweep(moons: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A sweep whose only run failed, a plug-in beside it, and the plug-in's canary."""
    out, canary = tmp_path / "out", tmp_path / "canary"
    assert main(["sweep", str(moons), "--out", str(out), f"init_from={tmp_path}/none", *MLM]) == 1
    (tmp_path / "evil_plugin.py").write_text(PLUGIN.format(canary=str(canary)))
    return out, canary


def rewrite(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON object in place."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content) + "\n")


def test_sweep_runs_only_code_that_the_command_line_names(failed_sweep, capsys):
    """Of sweep.json no plug-in, no line for a shell; of code/ only what its hash stands for."""
    out, canary = failed_sweep
    plugin, record = out.parent / "evil_plugin.py", out / "sweep.json"
    (snapshot,) = (out / "code").iterdir()
    whole = record.read_text()

    def refused(code: int, message: str, *words: str) -> None:
        capsys.readouterr()
        assert main(["sweep", "resubmit", "--failed", str(out), *words]) == code
        said = capsys.readouterr().err
        assert message in said and said.count("metaseq-lm: ") == 1, said
        assert not canary.exists() and "evil_plugin" not in sys.modules

    for named in (str(plugin), "evil_plugin"):
        rewrite(record, lambda content: content["definition"].update(user_dir=named))
        refused(2, "give --user-dir with its path")
        refused(2, "give --user-dir with its path", "--new-code")
    lines = {"executor": "slurm", "setup": [f"source {plugin}"]}
    record.write_text(whole)
    rewrite(record, lambda content: content.update(launch=lines))
    refused(2, "give them with --setup")
    record.write_text(whole)
    rewrite(record, lambda content: content["runs"][0]["stages"][0]["arguments"].append("--x"))
    refused(1, "arguments of 'seed=1' are not those")
    record.write_text(whole)

    changed = "of the code was changed"
    package = snapshot / "metaseq_lm" / "__init__.py"
    content = package.read_text()
    package.write_text(content + PLUGIN.format(canary=str(canary)))
    refused(1, changed)
    refused(1, changed, "--new-code")  # of the same code: in the same place
    package.write_text(content)
    added = snapshot / "torch.py"
    added.write_text(PLUGIN.format(canary=str(canary)))
    refused(1, changed)
    added.unlink()
    added.symlink_to("/dev/zero")
    refused(1, changed)
    added.unlink()
    (snapshot / "torch").symlink_to(out.parent)
    refused(1, changed)
    (snapshot / "torch").unlink()
    os.mkfifo(added)
    refused(1, changed)
    added.unlink()
    compiled = snapshot / "metaseq_lm" / "__pycache__" / "evil.pyc"
    compiled.parent.mkdir(exist_ok=True)
    compiled.write_bytes(b"evil")
    assert code_at(snapshot, None, None).folder == snapshot and not compiled.exists()


def test_programs_of_slurm_get_no_option_of_a_file(failed_sweep, capsys, monkeypatch):
    out, canary = failed_sweep
    programs = out.parent / "bin"
    programs.mkdir()
    for name in ("sbatch", "scancel", "squeue", "sacct", "srun"):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{canary}\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    jobs = out / "jobs.jsonl"
    whole = json.loads(jobs.read_text().splitlines()[-1])
    del whole["checksum"]  # as whoever writes such a file can
    odd = ["--user=root", "-u", "1 --me", "1,2", "1_2_3", "", "1_", "١", "1\n", "9" * 30, "1;id"]
    for key, values in {"job": odd, "folder": ["../..", "/etc"], "code": ["../../evil"]}.items():
        for value in values:
            jobs.write_text(json.dumps({**whole, "executor": "slurm", key: value}) + "\n")
            for command in (["status"], ["cancel"], ["resubmit", "--failed"]):
                assert main(["sweep", *command, str(out)]) == 1, (value, command)
                said = capsys.readouterr().err
                assert f"{key} {value[:60]!r} is not" in said, said
            assert not canary.exists(), canary.read_text()
    jobs.write_text(json.dumps({**whole, "executor": "slurm", "job": "12_3"}) + "\n")
    assert main(["sweep", "status", str(out)]) == 0
    assert "squeue -h -r -t all -o %i|%T|%r -j 12\n" in canary.read_text()
