"""Helpers of fine-tuning tests: a tiny model, ELECTRA's optimizer, a run's configuration."""

from pathlib import Path

from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.loading import load_config

FORMS = ("single", "pair", "choices", "spans", "regression")
SMALL = [
    "model.encoder_layers=1",
    "model.encoder_embed_dim=32",
    "model.encoder_ffn_embed_dim=64",
    "model.encoder_attention_heads=2",
    "model.max_positions=32",
    "model.segments=2",
    "engine.device=cpu",
    "engine.threads=1",
    "engine.tensorboard=false",
]
TASK = ["task=sentence_prediction", "criterion=sentence_prediction", "task.tokens_per_sample=32"]
ELECTRA = [
    "optimizer=adam_uncorrected",
    "optimizer.lr=0.005",
    "optimizer.betas=[0.9,0.999]",
    "schedule=polynomial",
    "schedule.warmup_ratio=0.1",
    "schedule.zero_based=true",
]


def configure(data: Path, save: Path, *more: str) -> RunConfig:
    """Return the configuration of a run on a folder of labelled sets; `more` wins."""
    return load_config([*TASK, *SMALL, *ELECTRA, f"data={data}", f"save_dir={save}", *more])
