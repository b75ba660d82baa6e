"""The settings of the SuperGLUE example are those of the paper's tables 7 to 9."""

from pathlib import Path

import pytest
from meta_pseudo_bench import CONFIGS

from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.benchmarks.as_text import AS_TEXT
from metaseq_lm.sweeps.definition import read_file

PLACE: Path = CONFIGS.parent / "superglue"


def configured(name: str) -> RunConfig:
    return load_config(["data=x"], str(PLACE / "config"), name)


@pytest.mark.parametrize("name", ["mlm", "soft", "hard"])
def test_sizes(name: str) -> None:
    """Table 7."""
    model = configured(name).model
    sizes = (model.encoder_layers, model.encoder_embed_dim, model.encoder_ffn_embed_dim)
    assert (*sizes, model.encoder_attention_heads, model.max_positions) == (6, 256, 1024, 4, 128)
    assert (model.dropout, model.attention_dropout, model.activation_dropout) == (0.1, 0.1, 0.0)


@pytest.mark.parametrize("name", ["mlm", "soft", "hard", "finetune"])
def test_optimizer_and_rows(name: str) -> None:
    config = configured(name)
    optimizer, task = config.optimizer, config.task
    assert (optimizer._name, list(optimizer.betas), optimizer.eps) == ("adamw", [0.9, 0.98], 1e-6)
    assert optimizer.clip_norm == 5.0 and config.schedule._name == "inverse_sqrt"
    assert not config.schedule.lr_is_peak
    assert (task.tokens_per_sample, task.stride, task.valid_size) == (128, 64, 128)


@pytest.mark.parametrize("name", ["mlm", "soft", "hard"])
def test_pretraining(name: str) -> None:
    """Table 8: 6M samples in batches of 64, or of 16 times 4."""
    config, task = configured(name), configured(name).task
    batch = (task.batch_size, task.batches_per_update)
    assert batch == ((64, 1) if name == "mlm" else (16, 4)) and task.samples_per_task == 16
    assert config.trainer.max_update * 64 == 6_000_000
    assert (config.optimizer.lr, config.schedule.warmup_updates) == (0.08, 10_000)
    assert config.optimizer.weight_decay == 0.01 and config.optimizer.decay_norms_and_biases
    masks = (task.mask_prob, task.random_token_prob, task.leave_unmasked_prob)
    assert masks == (0.15, 0.1, 0.1) and task.mlm_label_mask == "y"
    # Set i has task token [CLS2+i].
    assert [f"superglue/{name}" for name in task.labelled] == list(AS_TEXT)
    if name != "mlm":
        assert config.criterion.meta_weight == (10.0 if name == "soft" else 1.0)
        assert (config.criterion.inner_steps, config.criterion.inner_lr) == (1, 0.1)


def test_finetuning() -> None:
    """Table 9, and the rows of A's mini-validation."""
    config = configured("finetune")
    assert (config.task.batch_size, config.task.epochs) == (16, 20)
    assert (config.optimizer.weight_decay, config.schedule.warmup_updates) == (0.0, 100)
    trainer = config.trainer
    assert (trainer.valid_split, list(trainer.final_splits)) == ("mini", ["valid"])
    assert trainer.best_checkpoint_metric == "score" and trainer.maximize_best_checkpoint_metric


def test_sweeps() -> None:
    """The rates of table 9 on each task, a stage of its own with the task token of pre-training."""
    sweep = read_file(PLACE / "finetune_sweep.yaml")
    assert sweep["grid"]["optimizer.lr"] == [0.04, 0.01, 0.005]
    tasks = list(configured("mlm").task.labelled)
    assert [(stage["name"], stage["overrides"][:2]) for stage in sweep["stages"]] == [
        (name, [f"task.labelled={name}", f"task.task_token={2 + i}"])
        for i, name in enumerate(tasks)
    ]
    assert sweep["grid"]["method"] == read_file(PLACE / "sweep.yaml")["grid"]["method"]
