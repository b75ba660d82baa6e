"""Checkpoints that the processes of a sharded run write in parts."""

import json
import os
import shutil
from collections import ChainMap
from pathlib import Path

import pytest
import safetensors.torch
import torch
from battery import configure, train
from checkpoint_memory import measure
from kill_and_resume import torture
from old_checkpoints import age
from real_runs import FAULTS, FP64, MLM, Started, command, final, on_replicas, rows, same
from test_resume_elsewhere import losses, moments

from metaseq_lm.distributed import process_group, vectors
from metaseq_lm.distributed.placement import build_mesh
from metaseq_lm.distributed.shards import to_shard
from metaseq_lm.runs import checkpoint, manifests
from metaseq_lm.runs.manifests import CheckpointError
from metaseq_lm.runs.tensor_files import map_tensors

PARTS = ["part_00000.safetensors", "part_00001.safetensors"]
ROW = torch.ones(1, 4)


def go_on(data: Path, save: Path, updates: int, nproc: int, *more: str, **environment: str) -> str:
    """Train up to an update on some processes; return what it printed."""
    options = [*FP64, *more, f"trainer.max_update={updates}", "trainer.save_interval_updates=1"]
    options += ["--nproc", str(nproc)] if nproc > 1 else []
    run = Started(command(data, save, *options), save.with_suffix(".err"), environment)
    assert run.wait() == 0, run.text()
    return run.text()


@pytest.fixture(scope="module")
def sharded(moons: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three updates on two processes."""
    save = tmp_path_factory.mktemp("sharded") / "run"
    go_on(moons, save, 3, 2, "engine.parallel=shard")
    return save


@pytest.fixture
def copy(sharded: Path, tmp_path: Path) -> Path:
    """A copy of the run."""
    return Path(shutil.copytree(sharded, tmp_path / "run", symlinks=True))


@pytest.fixture(scope="module")
def straight(moons: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five updates on one process."""
    save = tmp_path_factory.mktemp("straight") / "run"
    go_on(moons, save, 5, 1)
    return save


def newest(save: Path) -> Path:
    return manifests.resolve(str(save), "last")


def test_each_process_writes_its_rows(sharded):
    """Half of weights and moments each, whole again when they are loaded."""
    sizes = [(newest(sharded) / name).stat().st_size for name in PARTS]
    assert max(sizes) < 1.2 * min(sizes)
    assert min(sizes) > 10 * (newest(sharded) / "model.safetensors").stat().st_size
    manifest = json.loads((newest(sharded) / "manifest.json").read_text())
    assert manifest["format"] == 4 and {*PARTS} < manifest["sha256"].keys()
    assert {path.name for path in newest(sharded).iterdir()} == {
        *(*PARTS, "manifest.json", "model.safetensors", "state.pt", "state.safetensors")
    }
    stored = checkpoint.load(newest(sharded))
    for moment in stored.state["optimizers"]["main"]["state"].values():
        assert moment["exp_avg"].any() and moment["exp_avg"].shape == moment["exp_avg_sq"].shape
    weights = sum(w.nbytes for w in stored.weights.values())
    assert 0.7 * sum(sizes) < 3 * weights < sum(sizes)


@pytest.mark.parametrize("nproc, parallel", [(1, "shard"), (2, "replicate"), (4, "hybrid")])
def test_it_goes_on_elsewhere(nproc, parallel, moons, copy, straight):
    """With other processes and placements, to the same losses and moments."""
    go_on(moons, copy, 5, nproc, f"engine.parallel={parallel}")
    assert (newest(copy) / PARTS[0]).is_file() == (parallel == "hybrid")
    assert torch.allclose(losses(copy), losses(straight), rtol=0, atol=1e-12)
    for a, b in zip(moments(final(copy)[1]), moments(final(straight)[1]), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_a_single_file_goes_on_in_parts(moons, straight, tmp_path):
    save = tmp_path / "run"
    go_on(moons, save, 3, 1)
    go_on(moons, save, 5, 2, "engine.parallel=shard")
    assert (newest(save) / PARTS[1]).is_file()
    assert torch.allclose(losses(save), losses(straight), rtol=0, atol=1e-12)


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("parts", [0, 3])
def test_a_run_of_an_earlier_version_goes_on(parts, nproc, moons, copy, straight):
    """One with all moments in state.pt, and one in parts of three processes."""
    age(copy, parts)
    before = json.loads((newest(copy) / "manifest.json").read_text())
    assert before["format"] == (3 if parts else 2)
    assert (newest(copy) / "part_00002.safetensors").is_file() == bool(parts)
    go_on(moons, copy, 5, nproc, "engine.parallel=shard")
    assert torch.allclose(losses(copy), losses(straight), rtol=0, atol=1e-12)
    for a, b in zip(moments(final(copy)[1]), moments(final(straight)[1]), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------- other readers


def wanted(save: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint by their names in its files, as we read them."""
    stored = checkpoint.load(newest(save))
    tensors = dict(stored.weights)
    map_tensors(tensors.__setitem__, stored.state)
    return tensors


@pytest.mark.parametrize("run", ["sharded", "straight"])
def test_torch_distributed_checkpoint_reads_it(run, request):
    """`dcp.load` into tensors that the caller has, without a process group."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    if not hasattr(dcp, "HuggingFaceStorageReader"):
        pytest.skip("this torch cannot read safetensors files with offsets")
    save = request.getfixturevalue(run)
    expected = wanted(save)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    reader = dcp.HuggingFaceStorageReader(str(newest(save)))
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    assert same(tensors, expected) and len(tensors) > 3 * 4


def test_torch_distributed_checkpoint_reads_all_of_it(sharded):
    """As dcp_to_torch_save does, which takes names and shapes from the files."""
    state_dict_loader = pytest.importorskip("torch.distributed.checkpoint.state_dict_loader")
    planner = pytest.importorskip("torch.distributed.checkpoint.default_planner")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    tensors: dict[str, torch.Tensor] = {}
    state_dict_loader._load_state_dict(
        tensors,
        storage_reader=dcp.HuggingFaceStorageReader(str(newest(sharded))),
        planner=planner._EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    expected = wanted(sharded)
    flat = {name: tensors.get(name) for name in expected}
    assert same(flat, expected)


def read_rows(save: Path, expected: dict[str, torch.Tensor]) -> None:
    """As one of three processes, read the rows of DTensors with `dcp.load`."""
    import torch.distributed.checkpoint as dcp

    process_group.initialise("cpu", 60)
    mesh = build_mesh("shard", "cpu")
    shards = {n: to_shard(torch.zeros_like(t), mesh) for n, t in expected.items() if t.dim()}
    dcp.load(shards, storage_reader=dcp.HuggingFaceStorageReader(str(newest(save))))
    for name, shard in shards.items():
        assert torch.equal(vectors.local_part(shard), vectors.rows_of(expected[name], shard)), name
    process_group.finish()


def test_processes_of_another_number_read_their_rows_with_it(sharded):
    on_replicas(3, read_rows, sharded, wanted(sharded))


def test_an_undivided_model_is_a_plain_file(straight):
    """Byte for byte what safetensors writes."""
    stored = checkpoint.load(newest(straight))
    written = (newest(straight) / "model.safetensors").read_bytes()
    assert written == safetensors.torch.save(stored.weights)


# ---------------------------------------------------------------- parts


def write_hybrid(folder: Path) -> None:
    """As one of two processes on two nodes each, save rows that two do not divide, and one row."""
    process_group.initialise("cpu", 60)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    mesh = build_mesh("hybrid", "cpu")
    weights = {"a/b": to_shard(torch.arange(15.0).view(5, 3), mesh), "c": to_shard(ROW, mesh)}
    process_group.check_equal(weights, 1)
    state = {"moments": {0: to_shard(ROW + 1, mesh), "step": torch.tensor(3)}}
    contents = checkpoint.stage(weights, state, process_group.rank() == 0)
    if process_group.rank() == 0:
        checkpoint.prepare(folder, 1, contents.size)
    process_group.from_first(None)
    sums = process_group.gather_objects(checkpoint.write(folder, 1, contents))
    if process_group.rank() == 0:
        checkpoint.commit(folder, 1, contents.manifest(1, {}), dict(ChainMap(*sums)))
    process_group.finish()


def test_replicas_of_a_shard_write_it_once(tmp_path):
    """Two nodes of two processes: two parts, which hold everything."""
    on_replicas(4, write_hybrid, tmp_path)
    path = manifests.folder_of(tmp_path, 1)
    assert sorted(p.name for p in path.glob("part*")) == PARTS
    stored = checkpoint.load(path)
    assert torch.equal(stored.weights["a/b"], torch.arange(15.0).view(5, 3))
    assert torch.equal(stored.weights["c"], ROW)
    assert torch.equal(stored.state["moments"][0], ROW + 1) and stored.state["moments"]["step"] == 3


def flip(path: Path) -> None:
    data = bytearray((path / PARTS[1]).read_bytes())
    data[-40] ^= 16
    (path / PARTS[1]).write_bytes(data)


def remove(path: Path) -> None:
    (path / PARTS[1]).unlink()


def forget(path: Path) -> None:
    """Leave a part out of the manifest."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"][PARTS[1]]
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "damage, reason",
    [
        (flip, "part_00001.safetensors is damaged"),
        (remove, "part_00001.safetensors: No such file"),
        (forget, "parts do not fit"),
    ],
)
def test_a_damaged_part_falls_back(damage, reason, moons, copy, straight):
    damage(newest(copy))
    with pytest.raises(CheckpointError, match=reason):
        checkpoint.load(newest(copy))
    go_on(moons, copy, 5, 2, "engine.parallel=shard")
    messages = [row["message"] for row in rows(copy, "event")]
    assert reason in messages[0] and "update_000000002 at" in messages[1]
    for a, b in zip(moments(final(copy)[1]), moments(final(straight)[1]), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_paths_of_a_manifest_lead_nowhere_else(copy):
    """A manifest from others cannot name other files or places."""
    path = newest(copy)
    manifest = json.loads((path / "manifest.json").read_text())
    sums = manifest["sha256"] | {"../part_00000.safetensors": "0", "part_00000.safetensors/x": "0"}
    (path / "manifest.json").write_text(json.dumps(manifest | {"sha256": sums}))
    assert checkpoint.load(path).state["update"] == 3
    age(copy, 2)
    old = json.loads((path / "manifest.json").read_text())
    for shards in ([], 7, [[[], [1]]], [[["state"], [1]]], [[[{}], []]], [["weights", 3]]):
        (path / "manifest.json").write_text(json.dumps(old | {"shards": shards}))
        with pytest.raises(CheckpointError, match="fit together|is damaged"):
            checkpoint.load(path)


def test_commands_read_parts(moons, sharded, tmp_path):
    """`evaluate` scores the run as it did itself; a run starts from it."""
    source = [str(sharded), "--data", str(moons), "--user-dir", FAULTS]
    run = Started(["evaluate", *source, "--split", "valid"], tmp_path / "evaluate.err")
    assert run.wait() == 0, run.text()
    loss = rows(sharded, "valid")[-1]["loss"]
    scores = json.loads(run.text().splitlines()[-1])
    assert scores["loss"] == pytest.approx(loss, rel=1e-9)
    more = [f"init_from={sharded}", "trainer.max_update=1", *FP64]
    train(configure(moons, tmp_path / "next", MLM, *more))
    assert rows(tmp_path / "next", "train")[0]["loss"] < rows(sharded, "train")[0]["loss"]


def test_no_kill_of_a_sharded_run_loses_anything(moons, tmp_path):
    """Every other kill is one of a single replica."""
    counts = torture(moons, tmp_path, 3, 2, 1, ["engine.parallel=shard"], single=True)
    assert not counts.troubles and counts.kills >= 3 and counts.single and counts.copies <= 1


@pytest.mark.slow
def test_a_process_needs_memory_for_its_part_only(tmp_path):
    """From building the model to weights and moments of a checkpoint of other processes."""
    figure = measure(tmp_path, saved_by=2, nproc=3, width=1024)
    assert figure["ratio"] <= 1.3 and figure["part"] < 0.34 * figure["whole"]


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [2, (2, 3)])
def test_no_kill_during_an_async_save_loses_anything(nproc, moons, tmp_path):
    """Resumed on as many processes, or on 2 and 3 in turn."""
    overrides = ["engine.parallel=shard", "trainer.async_save=true"]
    counts = torture(moons, tmp_path, 4, nproc, 2, overrides, single=True, in_save=2)
    assert not counts.troubles and counts.kills >= 4 and counts.in_save >= 2 and counts.copies <= 1
