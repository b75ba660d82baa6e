"""What fully_shard does not do still holds: otherwise code of ours could go."""

import json
from pathlib import Path

from fully_shard_limits import limits
from real_runs import on_replicas
from torch.distributed.device_mesh import init_device_mesh

from metaseq_lm.distributed import process_group


def write_limits(out: str) -> None:
    """As one of two replicas, write what comes of each."""
    process_group.initialise("cpu", 60)
    Path(out, f"{process_group.rank()}.json").write_text(
        json.dumps(limits(init_device_mesh("cpu", (2,))))
    )
    process_group.finish()


def test_what_fully_shard_does_not_do(tmp_path: Path) -> None:
    on_replicas(2, write_limits, str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    silent = {name: text for name, text in first.items() if text.startswith("no error")}
    assert silent == {
        "backward_inputs": "no error, 0 gradients",
        "second_derivatives": "no error, 4 gradients, 0 with a graph",
        "sum_of_root_only": "no error, gradients 0.50 times the sum",
    }
    assert set(first) - set(silent) == {"autograd_grad", "other_weights", "part_first", "number"}
