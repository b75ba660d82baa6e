"""Option names of transformers, fairseq, Lightning, Megatron-LM and nanoGPT, with ours."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class _Synonyms(NamedTuple):
    """An option, its names in other tools, and how it differs from theirs, if it does.

    The option is a key of the configuration, or a flag of some command.
    """

    option: str
    words: str
    difference: str = ""


TABLE = (
    _Synonyms(
        "data",
        "data-dir data-path dataset dataset-name dataset-path train-file train-data",
        "the DATA argument, a folder that 'metaseq-lm preprocess' made",
    ),
    _Synonyms(
        "save_dir",
        "output-dir run-dir checkpoint-dir checkpoint-path save-path default-root-dir log-dir",
        "the folder of one run",
    ),
    _Synonyms(
        "save_dir",
        "resume resume-from resume-from-checkpoint restore-file load-checkpoint ckpt-path",
        "a run whose folder exists is resumed; init_from starts a new run from its weights",
    ),
    _Synonyms("save_dir", "overwrite-output-dir", "no run is overwritten; give a new folder"),
    _Synonyms(
        "init_from",
        "model-name model-name-or-path pretrained pretrained-model pretrained-checkpoint "
        "finetune-from-model init-checkpoint load-weights",
        "a run or checkpoint; 'metaseq-lm import' makes a run of a transformers folder",
    ),
    _Synonyms("label", "run-name experiment-name exp-name"),
    _Synonyms("seed", "random-seed manual-seed rng-seed data-seed global-seed"),
    _Synonyms("model", "arch architecture model-type network"),
    _Synonyms("criterion", "loss loss-fn"),
    _Synonyms("optimizer", "optim optimizer-type optimizer-name"),
    _Synonyms(
        "schedule",
        "scheduler lr-scheduler lr-scheduler-type lr-schedule lr-decay-style scheduler-type",
    ),
    _Synonyms("optimizer.lr", "learning-rate peak-lr max-lr base-lr init-lr peak-learning-rate"),
    _Synonyms("optimizer.weight_decay", "wd l2"),
    _Synonyms(
        "optimizer.clip_norm",
        "max-grad-norm clip-grad grad-clip gradient-clip gradient-clip-val gradient-clipping "
        "clip-grad-norm",
    ),
    _Synonyms(
        "optimizer.betas", "adam-betas adam-beta1 adam-beta2 beta1 beta2", "a list, [0.9,0.999]"
    ),
    _Synonyms("optimizer.eps", "adam-eps adam-epsilon epsilon"),
    _Synonyms(
        "schedule.warmup_updates",
        "warmup warmup-steps warmup-iters num-warmup-steps lr-warmup-steps lr-warmup-iters",
    ),
    _Synonyms("schedule.warmup_ratio", "warmup-proportion warmup-fraction lr-warmup-fraction"),
    _Synonyms(
        "schedule.total_updates",
        "total-num-update total-num-updates lr-decay-steps lr-decay-iters num-training-steps",
        "the updates over which the rate falls; trainer.max_update ends the run",
    ),
    _Synonyms(
        "trainer.max_update",
        "max-steps max-updates max-iters train-iters num-steps total-steps train-steps "
        "num-train-steps max-train-steps num-updates",
    ),
    _Synonyms(
        "task.epochs",
        "epoch num-epochs max-epoch max-epochs num-train-epochs train-epochs",
        "of tasks on labelled sets; other runs are as long as trainer.max_update",
    ),
    _Synonyms("trainer.max_seconds", "max-time stop-time-hours", "in seconds"),
    _Synonyms(
        "task.batch_size",
        "train-batch-size per-device-train-batch-size per-device-batch-size "
        "per-gpu-train-batch-size per-device-eval-batch-size global-batch-size bsz max-sentences",
        "the rows of an update over all processes and micro-batches",
    ),
    _Synonyms(
        "task.batch_size",
        "max-tokens batch-tokens",
        "the rows of an update, of task.tokens_per_sample tokens each",
    ),
    _Synonyms(
        "engine.micro_batch_size",
        "gradient-accumulation-steps grad-accum-steps grad-accumulation-steps "
        "accumulate-grad-batches update-freq gradient-accumulation micro-bsz",
        "task.batch_size is all rows of an update; this is how many a process computes at a time, "
        "and changes no result",
    ),
    _Synonyms(
        "task.tokens_per_sample",
        "max-seq-length max-seq-len seq-length seq-len sequence-length block-size context-length "
        "max-source-positions",
    ),
    _Synonyms(
        "task.mask_prob", "mlm-probability mlm-prob masked-lm-prob mask-probability mask-ratio"
    ),
    _Synonyms("task.max_length", "max-source-length max-sequence-length"),
    _Synonyms(
        "trainer.log_interval", "logging-steps log-every log-every-n-steps log-steps log-freq"
    ),
    _Synonyms(
        "trainer.validate_interval_updates",
        "eval-steps eval-interval eval-iters val-check-interval eval-every validate-interval "
        "validation-steps",
        "in updates",
    ),
    _Synonyms(
        "trainer.save_interval_updates",
        "save-steps save-interval save-every checkpoint-interval checkpointing-steps save-freq",
        "in updates",
    ),
    _Synonyms(
        "trainer.save_interval_updates",
        "no-epoch-checkpoints no-save save-strategy no-last-checkpoints",
        "in updates; 0 saves only at the end",
    ),
    _Synonyms(
        "trainer.keep_last",
        "save-total-limit keep-last-epochs keep-interval-updates keep-last-n save-top-k",
    ),
    _Synonyms(
        "trainer.best_checkpoint_metric", "metric-for-best-model monitor load-best-model-at-end"
    ),
    _Synonyms("trainer.maximize_best_checkpoint_metric", "greater-is-better"),
    _Synonyms("trainer.patience", "early-stopping-patience early-stopping"),
    _Synonyms("trainer.valid_split", "valid-subset validation-split eval-split"),
    _Synonyms(
        "engine.precision",
        "fp16 bf16 half mixed-precision amp dtype torch-dtype memory-efficient-fp16 use-amp tf32",
        "fp32, bf16 or fp64; there is no fp16",
    ),
    _Synonyms("engine.device", "use-cpu no-cuda cpu cuda gpu accelerator", "auto, cpu or cuda"),
    _Synonyms(
        "--nproc",
        "gpus num-gpus n-gpu devices "
        "num-processes nproc-per-node distributed-world-size world-size",
        "processes on this machine",
    ),
    _Synonyms(
        "engine.workers", "dataloader-num-workers num-worker num-data-workers dataloader-workers"
    ),
    _Synonyms(
        "engine.parallel",
        "shard-optimizer fsdp zero-stage ddp-backend strategy deepspeed sharding-strategy",
        "replicate, shard or hybrid",
    ),
    _Synonyms(
        "engine.recompute",
        "gradient-checkpointing activation-checkpointing checkpoint-activations "
        "recompute-activations",
        "none or block",
    ),
    _Synonyms("engine.compile", "torch-compile compile-model"),
    _Synonyms(
        "engine.loggers", "report-to wandb wandb-project use-wandb mlflow", "a list, [wandb]"
    ),
    _Synonyms("engine.tensorboard", "tensorboard-logdir tensorboard-dir", "true or false"),
    _Synonyms(
        "task.objectives",
        "causal-share objective-mixture task-mixture mixture-weights",
        "a list of objectives with their weights, of task=mixture criterion=mixture",
    ),
    _Synonyms("model.encoder_layers", "num-layers n-layer n-layers num-hidden-layers"),
    _Synonyms("model.encoder_embed_dim", "hidden-size d-model n-embd embed-size"),
    _Synonyms("model.encoder_ffn_embed_dim", "intermediate-size ffn-hidden-size ffn-dim d-ff"),
    _Synonyms("model.encoder_attention_heads", "num-heads n-head n-heads num-attention-heads"),
    _Synonyms("model.dropout", "hidden-dropout hidden-dropout-prob dropout-prob"),
    _Synonyms("model.attention_dropout", "attention-probs-dropout-prob attn-dropout"),
    _Synonyms(
        "--destdir",
        "output-dir output-path output-prefix out-dir output out",
        "the data folder to fill",
    ),
    _Synonyms("--trainpref", "train-file input input-file dataset-path data-path train train-data"),
    _Synonyms("--validpref", "validation-file valid-file dev-file"),
    _Synonyms("--testpref", "test-file"),
    _Synonyms(
        "--tokenizer-from",
        "tokenizer-name tokenizer-path tokenizer-name-or-path srcdict vocab-file",
        "a folder with a tokenizer: a data folder, or an imported model",
    ),
    _Synonyms(
        "--workers", "num-workers num-proc preprocessing-num-workers nproc-workers", "processes"
    ),
    _Synonyms("--text-column", "text-column-name text-field json-keys"),
    _Synonyms("--out", "output-dir out-dir output output-file output-path results-path"),
    _Synonyms("--split", "gen-subset valid-subset eval-split subset"),
    _Synonyms("--input", "input-file test-file text-file"),
    _Synonyms("--batch-tokens", "max-tokens"),
)


def _normalise_flag(word: str) -> str:
    """Return a flag or the last part of a key in lower case with hyphens, as in the table."""
    return word.lstrip("-+~").rpartition(".")[2].lower().replace("_", "-")


def suggest_option(
    word: str, flags: Sequence[str] = (), flag_keys: Mapping[str, str] | None = None
) -> str:
    """Return a hint " Here it is ..." for another tool's option, "" for other words.

    Args:
        word: A flag, or a key with its group or without.
        flags: The flags of the command.
        flag_keys: The keys that flags of the command set, by flag; None if it takes no keys.
    """
    spelling = _normalise_flag(word)
    for flag in flags:
        if _normalise_flag(flag) == spelling:
            return f" Here it is {flag}."
    named = {flag: flag for flag in flags} | {key: flag for flag, key in (flag_keys or {}).items()}
    rows = [row for row in TABLE if spelling in (_normalise_flag(row.option), *row.words.split())]
    answers = [(named[row.option], row) for row in rows if row.option in named]
    if flag_keys is not None:
        answers += [(f"{row.option}=VALUE", row) for row in rows if row.option[0] != "-"]
    for option, row in answers:
        return f" Here it is {option}{row.difference and f': {row.difference}'}."
    return ""
