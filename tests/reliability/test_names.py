"""Names lead nowhere: not out of the folder they are for, and no secret into one."""

import contextlib
import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from battery import CASES, TINY
from outcomes import expect

from metaseq_lm.cli import main
from metaseq_lm.core.loading import load_config, quote

MLM = [*CASES["masked_lm"][0], *TINY, "trainer.max_update=1"]
NAMES = [
    *("../x", "../../x", "a/../../b", "/etc/x", "/tmp/metaseq_lm_evil", "a/b", "./x", "x/", "//x"),
    *("a\0b", "a\nb", "a\r\nb", "a\tb", "x" * 300, "", " ", "x ", " x", ".", "..", "...", "x."),
    *("~", "~root", "CON", "NUL.txt", "-x", "--overwrite", "*", "[a]", "{a}", "a=b", "x:y", "a,b"),
    *("аdmin", "ｔrain", "tr\u200bain", "train\u202egnp", "é", "\udc80", "%2e%2e%2fx", "..\\..\\x"),
    *(
        "a b;touch canary",
        "$(touch canary)",
        "`touch canary`",
        "'",
        '"',
        "${oc.env:HOME}",
        "[CLS0]",
    ),
]
ESCAPES = NAMES[:9]


def some(step: int, first: int = 0) -> list[str]:
    """Return those that lead elsewhere and every `step`th of the others, for slow commands."""
    return [*ESCAPES, *NAMES[len(ESCAPES) + first :: step]]


@pytest.fixture
def sandbox(
    moons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path, Path]]:
    """A working folder three levels down in an otherwise watched tree, and a data folder in it."""
    inner = tmp_path / "one" / "two" / "three"
    inner.mkdir(parents=True)
    data = tmp_path / "data"
    shutil.copytree(moons, data)
    (tmp_path / "t.txt").write_text("a b c\n")
    (tmp_path / "t.tsv").write_text("text\tlabel\na\tx\n")
    monkeypatch.chdir(inner)
    yield tmp_path, inner
    assert not Path("/etc/x").exists() and not Path("/tmp/metaseq_lm_evil").exists()


def listed(folder: Path) -> set[str]:
    """Return every path below a folder; links are not followed."""
    return {os.path.join(at, n) for at, down, files in os.walk(folder) for n in (*down, *files)}


def run(words: list[str]) -> tuple[int, str]:
    """Run a command; return its code and what it says."""
    err, out = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
        code = main(words)
    return code, err.getvalue()


def refused(words: list[str], root: Path, allowed: str = "") -> None:
    """Check that a command ends with one message, and that nothing but `allowed` is new."""
    before = listed(root)
    code, said = run(words)
    assert code in (1, 2), (words, said)
    assert "Traceback" not in said and said.count("metaseq-lm: ") == 1, (words, said)
    new = {path for path in listed(root) - before if not allowed or not path.startswith(allowed)}
    assert not new, words


def literal(value: str) -> str:
    """Return a value for the right side of key=value."""
    return "'" + value.replace("'", "\\'") + "'"


USES = {
    "task": lambda n, d: ["train", f"{d}/data", "--save-dir", "run", "--task", n],
    "criterion": lambda n, d: ["train", f"{d}/data", "--save-dir", "run", "--criterion", n],
    "init_from": lambda n, d: ["train", f"{d}/data", "--save-dir", "run", *MLM, "--init-from", n],
    "checkpoint": lambda n, d: ["evaluate", f"{n}/none"],
    "set": lambda n, d: ["preprocess", *to(d), "--labelled", n, "--trainpref", f"{d}/t.tsv"],
    "split": lambda n, d: ["preprocess", "--destdir", f"{d}/new", "--split", f"{n}={d}/t.txt"],
    "evaluated": lambda n, d: ["evaluate", f"{d}/run", "--out", f"{d}/out", "--split", n],
}


def to(folder: Path) -> list[str]:
    return ["--destdir", f"{folder}/data"]


HARMLESS = {"set": {"CON"}, "split": {"CON"}, "init_from": {""}}


@pytest.mark.parametrize("use", list(USES))
def test_names_create_nothing_elsewhere(use, sandbox):
    root, _ = sandbox
    for name in NAMES if use != "init_from" else some(3):
        words = USES[use](name, root)
        if name in HARMLESS.get(use, ()):
            continue
        refused(words, root)


@pytest.mark.parametrize("key", ["task.labelled", "trainer.valid_split", "trainer.final_splits"])
def test_names_in_a_config_stay_inside(key, sandbox):
    """Even where such a data set exists outside, nothing is written but the run's own folder."""
    root, inner = sandbox
    for place in ("x", "one/x", "one/two/x", "data/x"):
        shutil.copytree(root / "data", root / place, ignore=shutil.ignore_patterns("x"))
    tuned = ["--task", "token_labels", "--criterion", "token_labels", *TINY]
    tuned += ["task.labelled=which_moon_20"]
    for name in some(4, len(key) % 4):
        if key == "trainer.valid_split" and not name:
            continue  # no validation
        value = f"[{literal(name)}]" if key == "trainer.final_splits" else literal(name)
        train = ["train", f"{root}/data", "--save-dir", "run", *tuned, "--max-update", "1"]
        refused(
            [*train, "engine.tensorboard=false", f"{key}={value}"], root, allowed=str(inner / "run")
        )
        shutil.rmtree(inner / "run", ignore_errors=True)


def test_a_run_is_in_its_folder_whatever_that_is_called(sandbox):
    """--save-dir may be anywhere, and the run is there and nowhere else, or it is refused."""
    root, inner = sandbox
    trained = 0
    names = some(2)
    for name in names:
        if name.startswith("/"):
            continue  # the user's own wish
        before = listed(root)
        code, said = run(["train", f"{root}/data", f"--save-dir=runs/{name}", *MLM])
        assert code in (0, 1, 2) and "Traceback" not in said, (name, said)
        place = os.path.normpath(os.path.join(inner, "runs", name.replace("\0", "")))
        new = listed(root) - before
        parents = {str(p) for p in Path(place).parents} | {place, str(inner / "runs")}
        if "/../" in name:
            parents.add(str(inner / "runs" / name.split("/")[0]))
        assert all(path.startswith(place + os.sep) or path in parents for path in new), name
        assert bool(code) != (os.path.join(place, "results.json") in new), (name, said)
        trained += not code
        for path in sorted(new):
            if os.path.isdir(path):
                shutil.rmtree(path)
            elif os.path.exists(path):
                os.unlink(path)
    assert trained > len(names) / 2


@pytest.mark.parametrize(
    "name", ["a\nb", "a\tb", "a\0b", "tr\u200bain", "train\u202egnp", "\udc80"]
)
def test_a_run_folder_can_be_shown(name, sandbox):
    """A name that looks like another, or breaks a line of a log or a script, is refused."""
    root, _ = sandbox
    refused(["train", f"{root}/data", f"--save-dir=runs/{name}", *MLM], root)


def test_a_run_folder_that_is_a_link(sandbox):
    root, inner = sandbox
    (root / "disk").mkdir()
    (inner / "run").symlink_to(root / "disk")
    before = listed(root)
    assert run(["train", f"{root}/data", "--save-dir", "run", *MLM])[0] == 0
    new = listed(root) - before
    assert new and all(path.startswith(str(root / "disk") + "/") for path in new)


def test_flags_arrive_as_they_were_typed():
    """Whatever a flag's text, the configuration holds it unchanged, or it is refused."""
    for name in NAMES:
        if "${" in name:
            continue
        config = load_config(["task=masked_lm", f"label={quote(name)}"])
        assert config.label == name


PATHS = ["lr=0.001-seed=1", "a b", "it's", 'x"y', "[a]", "a,b", "#h", "50%", "é", "{a}", "1.50"]
PATHS += ["(x)", "a\\b", "1e-3", "true", "a'b\"c=[d],{e}", "k: v", "*", "-x", "a\\'b", "$x", "~"]


@pytest.mark.parametrize("key", ["data", "save_dir", "init_from"])
def test_paths_arrive_as_they_were_typed(key):
    """Hydra's grammar has no say in them; null and quotes have their meaning."""
    for name in PATHS:
        for path in (name, f"runs/{name}", f"/r/{name}/x"):
            assert getattr(load_config([f"{key}={path}"]), key) == path
    quoted = load_config([f"{key}='a, b'"])
    assert getattr(quoted, key) == "a, b"


def test_paths_in_a_list_arrive_as_they_were_typed():
    for text, paths in [("a=1/b,c d", ["a=1/b", "c d"]), ("'a,b',/c", ["a,b", "/c"])]:
        config = load_config(["task=bam", "criterion=bam_distill", f"task.teachers=[{text}]"])
        assert config.task.teachers == paths


def test_a_data_folder_with_an_equals_sign(sandbox):
    """A sweep's names of run folders can be passed on, and a folder is no option."""
    root, inner = sandbox
    shutil.copytree(root / "data", inner / "lr=1e-3")
    first = ["train", "lr=1e-3", *MLM, "save_dir=sw/lr=0.001-seed=1"]
    assert run(first)[0] == 0
    second = ["train", "./lr=1e-3", *MLM, "save_dir=it's [b], #2", "init_from=sw/lr=0.001-seed=1"]
    assert run(second)[0] == 0
    assert (inner / "it's [b], #2" / "results.json").is_file()
    expect(run(["train", "gone/lr=1e-3", *MLM, "--save-dir", "run"]), 2, "gone/lr=1e-3: there")


def test_names_of_metrics_stay_in_the_folder_of_a_report(sandbox):
    """Runs are found, not made by us: their metrics and keys are called as they please."""
    root, inner = sandbox
    assert run(["train", f"{root}/data", "--save-dir", "runs/1", *MLM])[0] == 0
    results = json.loads((inner / "runs/1/results.json").read_text())
    log = inner / "runs/1/log.jsonl"
    line = json.loads(log.read_text().splitlines()[0])
    del line["checksum"]
    config = inner / "runs/1/config.yaml"
    for number, name in enumerate(n for n in NAMES if n and "${" not in n and n != "\udc80"):
        content = results | {"metrics": {"test": {name: 0.5}}}
        (inner / "runs/1/results.json").write_text(json.dumps(content))
        log.write_text(json.dumps(line | {name: 1.0}) + "\n")
        before = listed(root)
        words = ["report", "runs", "--metric", f"test.{name}", "--out", "out"]
        more = ["--curve", f"train.{name}"] if number % 6 == 0 else ["--format", "csv"]
        code, said = run([*words, *more])
        assert code == 0, (name, said)
        new = listed(root) - before
        assert new and all(path.startswith(str(inner / "out")) for path in new), name
        assert not [path for path in new if len(Path(path).relative_to(inner).parts) > 2], name
        shutil.rmtree(inner / "out", ignore_errors=True)
    assert config.exists()


# ------------------------------------------------------------------------ secrets

SECRETS = {
    "METASEQ_LM_TEST_TOKEN": "tok-5f1e7c2a",
    "METASEQ_LM_TEST_API_KEY": "key-91b3d08e",
    "METASEQ_LM_TEST_SECRET": "sec-c47aa612",
    "METASEQ_LM_TEST_PASSWORD": "pwd-e0d95b3f",
}


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put secrets into the environment and return their values."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    return list(SECRETS.values())


def holding(folder: Path, values: list[str]) -> list[str]:
    """Return the files below a folder that hold one of the values, packed or not."""
    import zipfile

    found = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        parts = [path.read_bytes()]
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                parts += [archive.read(name) for name in archive.namelist()]
        if any(value.encode() in part for value in values for part in parts):
            found.append(str(path))
    return found


def test_no_secret_of_the_environment_is_written(secrets, sandbox, capfd):
    root, inner = sandbox
    (inner / "proof").mkdir()
    (inner / "proof" / "x").write_text(secrets[1])
    assert holding(inner, secrets) == [str(inner / "proof" / "x")]
    shutil.rmtree(inner / "proof")
    options = [*MLM, "engine.tensorboard=true", "trainer.final_splits=[valid]"]
    assert main(["train", f"{root}/data", "--save-dir", "run", *options]) == 0
    assert main(["evaluate", "run", "--split", "valid", "--out", "scores"]) == 0
    assert main(["report", "run", "--out", "report"]) == 0
    assert main(["doctor", f"{root}/data"]) == 0
    text = ["--trainpref", f"{root}/t.txt"]
    assert main(["preprocess", "--destdir", "new", "--tokenizer", "char", *text]) == 0
    assert main(["train", f"{root}/none", "--save-dir", "failed", *MLM]) == 2
    assert len(listed(inner)) > 20
    assert holding(root, secrets) == []
    shown = "".join(capfd.readouterr())
    assert not [value for value in secrets if value in shown]


ASKING = """
    ${oc.env:METASEQ_LM_TEST_SECRET} a-${oc.env:METASEQ_LM_TEST_SECRET}-b
    ${oc.env:METASEQ_LM_TEST_SECRET,none} ${oc.env:METASEQ_LM_TEST_UNSET,none}
    ${oc.decode:'${oc.env:METASEQ_LM_TEST_SECRET}'}
""".split()


@pytest.mark.parametrize("value", ASKING)
def test_a_config_may_not_ask_for_the_environment(value, secrets, sandbox, capsys):
    root, inner = sandbox
    text = f'defaults: [base, _self_]\nlabel: "{value}"\n'
    (inner / "mine.yaml").write_text(text)
    command = ["train", f"{root}/data", "--save-dir", "run", *MLM]
    ways = [["--config-dir", ".", "--config-name", "mine"], ["--label", value]]
    for more in ways if "decode" not in value else ways[:1]:
        assert main([*command, *more]) == 2
        said = capsys.readouterr().err
        assert said.count("metaseq-lm: ") == 1 and "Traceback" not in said
        assert "label asks" in said and "variable METASEQ_LM_TEST_" in said, said
        assert not [secret for secret in secrets if secret in said]
    assert not (inner / "run").exists()


def test_the_name_of_the_resolver_may_be_put_together(secrets, sandbox):
    root, inner = sandbox
    text = (
        "defaults: [base, _self_]\ninit_from: oc\nlabel: ${${init_from}.env:METASEQ_LM_TEST_SECRET}"
    )
    (inner / "mine.yaml").write_text(text)
    command = ["train", f"{root}/data", "--save-dir", "run", *MLM]
    code, said = run([*command, "--config-dir", ".", "--config-name", "mine"])
    assert code == 2 and not [secret for secret in secrets if secret in said]


def test_other_references_and_programs_keep_theirs(sandbox):
    """A config may refer to itself; Hydra's own configs may read the environment afterwards."""
    from omegaconf import OmegaConf

    config = load_config(["task=masked_lm", "label='s${seed}'", "seed=7"])
    assert config.label == "s7"
    assert OmegaConf.create({"a": "${oc.env:PATH}"}).a == os.environ["PATH"]


def test_home_stands_for_a_tilde_wherever_a_path_is_typed(sandbox, monkeypatch):
    """Behind "=" no shell replaces it; removing a folder called ~ removes the home."""
    place, inner = sandbox
    monkeypatch.setenv("HOME", str(inner / "home"))
    (inner / "home").mkdir()
    shutil.copytree(place / "data", inner / "home" / "data")
    assert main(["train", "~/data", "--save-dir=~/run", *MLM]) == 0
    assert main(["train", "data=~/data", "save_dir=~/next", "init_from=~/run", *MLM]) == 0
    assert main(["evaluate", "~/next", "--split=valid", "--out=~/scores"]) == 0
    assert {path.name for path in (inner / "home").iterdir()} == {"data", "run", "next", "scores"}
    assert not (inner / "~").exists()
