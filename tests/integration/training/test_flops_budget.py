"""A budget in FLOPs: how many updates it pays for."""

from pathlib import Path

from agreement import SIZES, make_data

from metaseq_lm.core.loading import load_config
from metaseq_lm.training.price import estimate_price, resolve_budget


def test_all_seeds_of_a_setting_make_as_many_updates(tmp_path: Path) -> None:
    """Their schedules end alike and reports find one setting, though their batches differ."""
    data = make_data(tmp_path)
    words = [*SIZES, "task.batch_size=4", f"data={data}", f"save_dir={tmp_path}/run"]
    words += ["trainer.max_update=0", "trainer.max_flops=1e10"]
    configs = [load_config([*words, f"seed={seed}"]) for seed in (1, 2, 3)]
    assert len({estimate_price(config).flops for config in configs}) > 1
    resolved = [resolve_budget(config) for config in configs]
    assert len({config.trainer.max_update for config in resolved}) == 1
    assert [config.seed for config in resolved] == [1, 2, 3]
