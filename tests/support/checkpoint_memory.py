"""Measure the peak of memory of each process that resumes a sharded run.

  python tests/support/checkpoint_memory.py [--nproc 3] [--saved-by 2] [--width 1024]

It prints a line of JSON: the bytes of parameters and moments that a process holds (its part), and
the process's peak memory beyond that before the model was built, as a multiple of its part.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from battery import CASES, TINY
from kill_and_resume import make_data
from real_runs import on_replicas

from metaseq_lm.core.loading import load_config
from metaseq_lm.distributed import process_group, vectors
from metaseq_lm.training.run import TrainingRun


def resident(key: str) -> int:
    """Return VmRSS, or VmHWM, its peak since `forget_peak`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def forget_peak() -> None:
    """Reset the peak of resident memory to the current value."""
    Path("/proc/self/clear_refs").write_text("5")


def held(run: TrainingRun) -> int:
    """Return the bytes of parameters and moments of this process."""
    (optimizer,) = run.engine.optimizers.values()
    parameters = [vectors.local_part(parameter) for parameter in optimizer.parameters]
    moments = [
        value
        for slots in optimizer.local_state()["state"].values()
        for value in slots.values()
        if value.dim()
    ]
    return sum(tensor.nbytes for tensor in (*parameters, *moments))


def one_update(data: Path, save: Path, width: int, out: Path) -> None:
    """As a replica, resume the run if there is one, record the memory, and make an update."""
    process_group.initialise("cpu", 600)
    name, number = ("masked_lm", 0)
    sizes = [f"model.encoder_embed_dim={width}", f"model.encoder_ffn_embed_dim={4 * width}"]
    resumes = (save / "checkpoints").exists()
    options = [f"data={data}", f"save_dir={save}", f"criterion={name}", *CASES[name][number]]
    options += [*TINY, *sizes, "engine.parallel=shard", "task.batch_size=4"]
    options += ["trainer.valid_split=''", f"trainer.max_update={1 + resumes}"]
    forget_peak()
    before = resident("VmRSS")
    run = TrainingRun(load_config(options))
    if resumes:
        run.trainer.resume()
        facts = {"part": held(run), "peak": resident("VmHWM") - before}
        gathered = process_group.gather_objects(facts)
        if process_group.rank() == 0:
            out.write_text(json.dumps(gathered))
    else:
        run.train()
    process_group.finish()


def measure(folder: Path, saved_by: int, nproc: int, width: int) -> dict[str, Any]:
    """Save a run on some processes and resume it on others; return the worst part and ratio."""
    arguments = (make_data(folder), folder / "run", width, folder / "out.json")
    on_replicas(saved_by, one_update, *arguments, seconds=900)
    on_replicas(nproc, one_update, *arguments, seconds=900)
    lines = json.loads((folder / "out.json").read_text())
    worst = max(lines, key=lambda line: line["peak"] / line["part"])
    return {
        "saved_by": saved_by,
        "processes": nproc,
        "part": worst["part"],
        "peak": worst["peak"],
        "ratio": worst["peak"] / worst["part"],
        "whole": sum(line["part"] for line in lines),
    }


def main() -> None:
    """Parse the command line and print the figure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nproc", type=int, default=3)
    parser.add_argument("--saved-by", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024, help="of the model's two layers")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), args.saved_by, args.nproc, args.width)))


if __name__ == "__main__":
    main()
