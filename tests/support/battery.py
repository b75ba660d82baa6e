"""The cases of the battery: one small run per registered criterion, and how to train it."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import small_data
import torch
from torch import Tensor

from metaseq_lm import plugins
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.loading import load_config
from metaseq_lm.core.registry import TASKS as REGISTERED_TASKS
from metaseq_lm.data.streams import Shard
from metaseq_lm.distributed import process_group, shards
from metaseq_lm.runs import checkpoint, manifests
from metaseq_lm.runs.flops import FlopMeter
from metaseq_lm.training.run import TrainingRun

Case = tuple[str, int]
Run = tuple[Case, str, list[str]]  # case, label, overrides
# Returns the weights of a case after training on whole batches, or before training.
Whole = Callable[..., dict[str, Tensor]]
ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "model.encoder_layers=2",
    "model.encoder_embed_dim=8",
    "model.encoder_ffn_embed_dim=16",
    "model.encoder_attention_heads=2",
    "model.max_positions=34",
    "schedule.warmup_updates=4",
    "optimizer.lr=0.005",
    "trainer.log_interval=1",
    "engine.tensorboard=false",
    "engine.threads=1",
]
META = ["task=meta_pseudo_label", "task.labelled=[which_moon_20]", "task.valid_size=16"]
CUT = ["task.tokens_per_sample=5", "task.stride=0"]  # makes rows of "pairs" windows
TEXT = ["task.sample_break_mode=eos", "task.tokens_per_sample=34", "task.batch_size=16"]
SPANS = ["task=span_corruption", *TEXT, "task.tokens_per_sample=20"]
DECODER = ["model=encoder_decoder"]
MODERN_DECODER = ["model=modern_encoder_decoder", "model.local_window=6"]
PACKED = ["task.tokens_per_sample=34", "task.batch_size=16", "model.segments=2"]
ROUNDED = ["task.sample_break_mode=segments", "task.mask_rounding=nearest"]
SENTENCES = ["task=sentence_prediction", "task.batch_size=10", "task.tokens_per_sample=12"]
TAGS = ["task=token_classification", "task.labelled=tagged", "task.batch_size=8"]
ELECTRA = ["task=electra", "model=electra", "model.generator_size=0.5", *TEXT]
FALLING = ["task.mask_rates=[0.5,0.1]", "task.mask_updates=9"]
PHASES = ["task.mask_rates=[0.5,0.1]", "task.mask_phases=[0.4,0.6]", "task.mask_updates=9"]
MIXTURE = ["task=mixture", *TEXT]
# In an update after the first phase, each of four processes has rows of one objective.
BY_PHASE = [
    'task.objectives=["causal_lm weight=[1,0] criterion.z_loss=0.01",'
    '"masked_diffusion weight=[0,0.3]","prefix_lm weight=[0,0.7]","masked_next_token weight=0"]',
    *("task.phases=[1,2]", "task.phase_updates=7"),
]
RISING = ["criterion.decay_updates=9"]
TOWERS = [*ELECTRA, "model.noise=two_tower"]
# Rows have several windows; the second layer is local.
MODERN = ["model=modern", "model.local_window=6"]
GROUPED = ["model.attention=grouped_query", "model.part_options={kv_heads:1}"]
DIFFERENTIAL = ["model.attention=differential"]
DOCUMENTS = ["task.sample_break_mode=documents"]
# The length changes at updates where resumed runs stop, and between these.
LENGTHS = [
    *("task.row_lengths=[9,20,34]", "task.length_phases=[0.2,0.35,0.45]"),
    "task.length_updates=9",
]
WARM = ["task.batch_warmup_updates=4", "task.length_warmup_updates=3"]
PARTS = ["criterion.z_loss=0.01", "criterion.label_smoothing=0.1"]
MODERN_ELECTRA = ["task=electra", "model=modern_electra", "model.generator_size=0.5", *TEXT]
# Instead of the sizes above.
LSTM = ["model=bilstm_lm", "model.encoder_embed_dim=8", "model.encoder_hidden_dim=12"]
TWO_STEPS = ["task.inner_steps=2"]
SGD_STEPS = [*TWO_STEPS, "task.inner_optim=sgd", "task.inner_lr=0.1"]
EXACT_STEPS = [*SGD_STEPS, "task.second_order=exact"]
LABELLED_SETS = [
    "task=meta_pretrain_pairs",
    "task.labelled=[pairs,which_moon_20]",
    "task.tokens_per_sample=12",
    "model.segments=2",
]
TARTAN = [
    "task=tartan",
    "task.labelled=which_moon_20",
    "task.tokens_per_sample=34",
    "task.batch_size=8",
    "task.meta_head_batch_size=4",
]
IMAGES = [
    "task=tartan_vision",
    "task.target=[a,b]",
    "task.batch_size=8",
    "task.dev_batch_size=8",
    "task.meta_head_batch_size=4",
    "model=wide_resnet",
    "model.depth=10",
    "model.width=1",
    "model.norm=group",
]
BAM = [
    "task=bam",
    "task.labelled=[pairs,scores]",
    "task.batch_size=8",
    "task.tokens_per_sample=12",
    "model.segments=2",
    "criterion.total_updates=20",
]
# The folder of stored outputs is next to the data.
TAUGHT = [*BAM, "task.teachers=[]"]
QUESTIONS = [
    "task=squad",
    "task.labelled=squad",
    "task.tokens_per_sample=34",
    "task.doc_stride=9",
    "task.beam=4",
    "task.batch_size=8",
]
CLOZE = ["task=cloze", "task.labelled=CLOTH", "task.batch_size=8", "task.tokens_per_sample=34"]
TRANSLATION = [
    "model=lstm_encoder_decoder",
    "model.layers=1",
    "model.embed_dim=4",
    "model.hidden_dim=8",
    "model.output_dim=6",
    "task.batch_size=8",
    "task.bleu=false",
]
CVT_TRANSLATION = ["task=cvt_translation", "task.beam_size=2", *TRANSLATION]
LARGER_IMAGES = [
    "task=cvt_vision",
    "task.labelled=40",
    "task.valid_count=20",
    "task.batch_size=8",
    "task.unlabelled_batch_size=8",
    "model=conv_large",
    "model.width=0.01",
]
MOVED = ["task.joint=true", "task.translate=2"]
WORDS = [
    "model=cnn_bilstm",
    "model.word_embed_dim=6",
    "model.char_embed_dim=3",
    "model.char_filters=2",
    "model.encoder_hidden_dim=6",
    "model.second_hidden_dim=4",
    "model.projection_dim=4",
    "task.hidden_dim=6",
    "task.batch_size=8",
]
CVT = ["task=cvt", "task.labelled=[chunk,dep]", "task.parser_dim=4", *WORDS]
# The checkpoint is next to the data.
ELMO = ["task.elmo=", "task.elmo_dropout=0.3"]
WORD_LM = ["task=word_language_modeling", "task.batch_size=8", *LSTM]
ABLATIONS = [
    "criterion.all_sets=false",
    "criterion.mean_teacher=true",
    "criterion.gold_auxiliaries=true",
    "criterion.hard_targets=true",
    "criterion.weigh_confidence=true",
    "criterion.unlabelled_warmup=9",
    "task.labelled_first=2",
    "criterion.confidence=0.0105",  # about the median of trees: one class in a hundred
]
UNDIVIDED = "criterion.fidelity=paper"
# A displacement large enough not to amplify rounding errors.
DIFFERENCES = ["criterion.hypergradient=finite_difference", "criterion.difference_step=0.1"]
# test_battery fails for a registered criterion without a case here.
CASES: dict[str, list[list[str]]] = {
    "masked_lm": [
        ["task=masked_lm", *TEXT],
        [*META, "task.reward_interval=16"],
        ["task=masked_lm", *PACKED, *ROUNDED],
        ["task=meta_pretrain", *PACKED, *SGD_STEPS],
        [*TARTAN, "task.auxiliary=[train,tapt]", "task.lines_per_example=2"],
        ["task=masked_lm", *TEXT, *MODERN, *DOCUMENTS, "model.norm=rms", "model.qk_norm=true"],
        ["task=masked_lm", *TEXT, "task.mask_unit=word", *FALLING, "optimizer=adafactor"],
        ["task=masked_lm", *TEXT, "task.mask_unit=span", "task.span_anchors=tokens", *PARTS],
    ],
    "bert_pretraining": [
        ["task=sentence_pairs", *PACKED],
        ["task=meta_pretrain", *PACKED, *TWO_STEPS],
        ["task=meta_pretrain", *PACKED, *EXACT_STEPS],
        ["task=sentence_pairs", *PACKED, *LENGTHS, "task.length_keeps=rows"],
    ],
    "causal_lm": [
        ["task=causal_lm", *TEXT],
        ["task=causal_lm", *TEXT, "task.sample_break_mode=none", "task.batch_size=3"],
        ["task=causal_lm", *TEXT, *MODERN, *GROUPED, "model.gate=silu", "model.vocab_multiple=8"],
        ["task=causal_lm", *TEXT, *MODERN, *WARM, "optimizer=muon", "criterion.z_loss=0.01"],
    ],
    "prefix_lm": [
        ["task=prefix_lm", *TEXT],
        ["task=prefix_lm", *TEXT, *MODERN, *DOCUMENTS],
        ["task=prefix_lm", *TEXT, *WARM, *PARTS, "optimizer=soap"],
    ],
    "masked_next_token": [
        ["task=masked_next_token", *TEXT],
        ["task=masked_next_token", *TEXT, *MODERN, *DOCUMENTS, *LENGTHS],
        ["task=masked_next_token", *TEXT, "task.mask_unit=short_span", *FALLING, *WARM, *PARTS],
    ],
    "masked_diffusion": [
        ["task=masked_diffusion", *TEXT],
        ["task=masked_diffusion", *TEXT, "criterion.shifted=true", "task.times=bell"],
        ["task=masked_diffusion", *TEXT, *MODERN, *DIFFERENTIAL, "task.weights=flat"],
        ["task=masked_diffusion", *TEXT, *WARM, *PARTS],
    ],
    "mixture": [
        [*MIXTURE, *LENGTHS, 'task.objectives=["masked_lm weight=0.9","causal_lm weight=0.1"]'],
        [*MIXTURE, *MODERN, *BY_PHASE],
    ],
    "language_modeling": [
        ["task=language_modeling", *TEXT, *LSTM],
        WORD_LM,
        ["task=meta_pretrain_lstm", *TEXT, *LSTM, *TWO_STEPS],
    ],
    "meta_pretrain_pairs": [
        [*LABELLED_SETS, "task.batch_size=8", *TWO_STEPS],
        [*LABELLED_SETS, "task.batch_size=8", *SGD_STEPS],
    ],
    "meta_pseudo_label_hard": [
        META,
        [*META, "criterion.reward=dot", "criterion.inner_steps=0", "task.include_mlm_task=true"],
        [*META, "criterion.reward=neg_loss"],
        [*META, "criterion.fidelity=paper"],
    ],
    "meta_pseudo_label_soft": [
        META,
        [*META, "criterion.fixed_y=true", "criterion.pretrain_step=sgd", UNDIVIDED],
        [*META, "criterion.finetune_step=adamw", "task.mlm_label_mask=x"],
        [*META, "criterion.inner_steps=0", "criterion.targets=flat"],
        [*META, *DIFFERENCES],
        [*META, "task.labelled=[which_moon_20,pairs]", *CUT],
        [*META, *MODERN, *DIFFERENTIAL, "model.vocab_multiple=8"],
    ],
    "token_labels": [
        ["task=token_labels", "task.labelled=which_moon_20"],
        ["task=token_labels", "task.labelled=pairs", *CUT],
    ],
    "sentence_prediction": [
        [*SENTENCES, "task.labelled=which_moon_20"],
        [*SENTENCES, "task.labelled=pairs", "model.segments=2", "optimizer.layer_decay=0.8"],
        [*SENTENCES, "task.labelled=topics"],
        [*SENTENCES, "task.labelled=scores", "optimizer.decay_norms_and_biases=false"],
        [*SENTENCES, "task.labelled=pairs", "criterion.batch_sum=false", "task.pooled=true"],
        [*SENTENCES, "task.labelled=pairs", *LSTM],
    ],
    "token_classification": [
        [*TAGS, "task.tokens_per_sample=34"],
        # Rows are parts of sentences.
        [*TAGS, "task.tokens_per_sample=12", "criterion.batch_sum=false", "task.batch_size=6"],
    ],
    "bam_distill": [
        [*TAUGHT, "task.pooled=false", "criterion.temperature=2"],
        [*BAM, "task.sampling=legacy_copies"],
    ],
    "cloze": [
        [*CLOZE],
        [*CLOZE, "criterion.batch_sum=false", "task.tokens_per_sample=12"],
    ],
    "squad": [
        [*QUESTIONS, "optimizer.clip_norm=1"],
        [*QUESTIONS, "task.joint=false", "task.answerability=false", "criterion.batch_sum=false"],
    ],
    "tartan_mt": [
        TARTAN,
        [*TARTAN, "task.auxiliary=[train,tapt]", "criterion.weights=[1,2,3]"],
        [*TARTAN, "task.auxiliary=[train,tapt]", "task.fidelity=authors"],
        IMAGES,
    ],
    "tartan_meta": [
        TARTAN,
        [*TARTAN, "task.auxiliary=[train,tapt]", "criterion.same_head=true"],
        [*TARTAN, "criterion.meta_head_split=dev"],
        [*TARTAN, "criterion.similarity=dot", "criterion.similarity_over=body"],
        [*TARTAN, "criterion.algorithm_1=true"],
        [*IMAGES, "criterion.meta_head_split=dev"],
    ],
    "translation": [["task=translation", *TRANSLATION]],
    "cvt_translation": [CVT_TRANSLATION],
    "word_dropout_translation": [CVT_TRANSLATION],
    "image_classification": [LARGER_IMAGES],
    "cvt_vision": [[*LARGER_IMAGES, *MOVED, "criterion.perturbation=adversarial"]],
    "vat_vision": [[*LARGER_IMAGES, "criterion.xi=1", "criterion.radius=1"]],
    "tagging": [["task=tagging", "task.labelled=chunk", *WORDS], [*CVT, *ELMO]],
    "parsing": [["task=parsing", "task.labelled=dep", "task.parser_dim=4", *WORDS]],
    "cvt_aux": [CVT, [*CVT, "task.root=vector", *ABLATIONS]],
    "word_dropout": [[*CVT, "task.label_fraction=0.5"]],
    "vat": [[*CVT, "model.normalize_words=true", "criterion.xi=1"]],
    "wnli": [
        ["task=wnli", "task.labelled=WNLI", "task.tokens_per_sample=34", "task.batch_size=8"],
    ],
    "electra_rtd": [
        ELECTRA,
        TOWERS,
        [*ELECTRA, "criterion.contrast=0.3", "criterion.disc_positions=random"],
        [*ELECTRA, "model.sharing=none"],
        [*ELECTRA, "model.sharing=all", "model.generator_size=1"],
        [*MODERN_ELECTRA, "model.local_window=6", "model.vocab_multiple=8"],
        [*ELECTRA, "task.mask_unit=span", *PHASES, *LENGTHS, "task.batch_warmup_updates=7"],
    ],
    "electric_nce": [TOWERS, [*ELECTRA, "model.noise=unigram", "criterion.exact_counts=true"]],
    "two_tower_cloze": [TOWERS],
    "replace_mlm": [ELECTRA],
    "all_tokens_mlm": [ELECTRA],
    "electra_adversarial": [ELECTRA],
    "strategic_mlm": [[*ELECTRA, "model.noise=difficulty"]],
    "span_corruption": [
        [*SPANS, "task.mean_span=2"],
        [*SPANS, *MODERN, "task=ul2", "task.batch_size=5"],
        [*SPANS, *DECODER, "model.decoder_layers=1"],
        [*SPANS, "task=ul2", *MODERN_DECODER, "model.vocab_multiple=8"],
        [*SPANS, *WARM, *PARTS, "optimizer=lamb"],
    ],
    "span_boundary": [
        ["task=span_masking", *TEXT, "criterion.boundary_weight=0.5", "task.mean_span=3"]
    ],
    "next_latent": [
        ["task=next_latent", *TEXT, "criterion.horizon=2"],
        ["task=next_latent", *TEXT, *MODERN, *DOCUMENTS, "task.dynamics_dim=5"],
    ],
    "joint_embedding": [
        ["task=joint_embedding", *TEXT, *RISING],
        ["task=joint_embedding", *TEXT, *MODERN, *RISING, "criterion.share=0.3"],
    ],
}
ALL = [(name, i) for name, cases in CASES.items() for i in range(len(cases))]
FIRST = [(name, 0) for name in CASES]


def task_of(case: Case) -> str:
    """Return the override that chooses the task of a case."""
    options = CASES[case[0]][case[1]]
    return next((o for o in options if o.startswith("task=")), "task=masked_lm")


def plug_in_of(case: Case) -> str | None:
    """Return the folder of the plug-in that a case needs, None for none."""
    origin = REGISTERED_TASKS.entry(task_of(case).removeprefix("task=")).origin
    return str(ROOT / "user_dir") if origin.split(".")[0] == "user_dir" else None


# The first case of each task.
TASKS = list({task_of(case): case for case in reversed(FIRST)}.values())[::-1]
# Unrolled steps, and exact second derivatives of three of them.
BILEVEL = [("meta_pseudo_label_soft", 0), ("bert_pretraining", 2)]
# Cases by number of processes and placement of the parameters. The task decides how four replicas,
# one of them without rows, share the rows. Four processes pose as two nodes of two (see
# replicated).
REPLICATED = {
    (2, "replicate"): ALL,
    (2, "shard"): FIRST,
    (4, "hybrid"): [*TASKS, *BILEVEL],
    (4, "replicate"): [*TASKS, *BILEVEL],
}


def configure(data: Path, save: Path, case: Case, *more: str) -> RunConfig:
    """Return the configuration of a case; `more` comes last and wins.

    `data` is the Two Moons folder; the data of a case is made in it or next to it.
    """
    name, number = case
    own = CASES[name][number]
    options = [*TINY, *more]
    text = " ".join(own)
    for labelled in small_data.SETS:
        if re.search(rf"task\.labelled=\S*\b{labelled}\b", text):
            small_data.ensure(data, labelled)
    if set(TAUGHT) <= set(own):
        own = [*own, f"task.teachers=[{small_data.ensure(data, 'teacher')}]"]
    if set(ELMO) <= set(own):
        own = [*own, f"task.elmo={small_data.ensure(data, 'elmo') / 'last'}"]
    if set(PACKED) <= set(own):
        data = small_data.ensure(data, "documents")
    elif set(IMAGES) <= set(own):
        data = small_data.ensure(data, "images")
    elif set(TRANSLATION) <= set(own):
        data = small_data.ensure(data, "parallel")
    elif set(LARGER_IMAGES) <= set(own):
        data = small_data.ensure(data, "larger_images")
    elif set(WORDS) <= set(own) or set(WORD_LM) <= set(own):
        data = small_data.ensure(data, "words")
    if any(set(sizes) <= set(own) for sizes in (IMAGES, LSTM, TRANSLATION, LARGER_IMAGES, WORDS)):
        # These have only the dropout among a Transformer's options.
        options = [o for o in options if not o.startswith("model.") or "model.dropout" in o]
    places = [f"data={data}", f"save_dir={save}", f"criterion={name}"]
    return load_config([*own, *places, *options])


def has_few_rows(case: Case) -> bool:
    """Return whether only micro-batches of one row can divide a pass on two processes."""
    return "meta_pseudo_label" in task_of(case) or case[0] == "token_labels"


def few_rows(case: Case) -> list[str]:
    """Return the override for validation on few rows; some tasks validate on all rows."""
    on_all = task_of(case).endswith(("=squad", "=wnli", "_vision"))
    return [] if on_all else ["task.valid_size=16"]


def exact(*more: str) -> list[str]:
    """Return overrides for runs whose results must agree to 1e-12: float64, no dropout.

    Rate and eps keep training from amplifying a rounding error of 1e-16 beyond that: the derivative
    of an AdamW step at a tiny second moment is as large as 1 / eps.
    """
    off = ["model.dropout=0", "model.attention_dropout=0", "engine.precision=fp64"]
    calm = ["optimizer.lr=0.002", "optimizer.eps=1e-4"]
    return [*off, *calm, "trainer.max_update=10", *more]


def dropped(*more: str) -> list[str]:
    """Return overrides for five exact updates with dropout, an epoch of token_labels.

    Dropout masks depend on rows and not on calls.
    """
    on = ["model.dropout=0.1", "model.attention_dropout=0.1"]
    return exact(*on, "trainer.max_update=5", *more)


def train(config: RunConfig) -> dict[str, Tensor]:
    """Train a run and return its weights."""
    run = TrainingRun(config)
    run.train()
    return weights_of(run)


def weights_of(run: TrainingRun) -> dict[str, Tensor]:
    """Return a copy of a run's current weights."""
    weights = run.model.state_dict()
    return {name: w.clone() for name, w in zip(weights, shards.gather_whole([*weights.values()]))}


def shift_weights(run: Path) -> None:
    """Add 1 to the weights of a checkpoint, or of a run's best one, to make it another."""
    path = manifests.resolve(str(run), prefer="best")
    stored = checkpoint.load(path)
    weights = {name: weight + 1 for name, weight in stored.weights.items()}
    checkpoint.save(path.parent, stored.manifest["update"], weights, stored.state, stored.manifest)


def train_uncounted(config: RunConfig) -> dict[str, Tensor]:
    """Train a run without counting its FLOPs, which takes a third of the time of a small run."""
    with uncounted():
        return train(config)


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Count no FLOPs inside the block, where nothing needs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlopMeter, "count", lambda meter, work: contextlib.nullcontext())
        yield


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the largest absolute difference between two sets of weights."""
    assert a.keys() == b.keys()
    return max((a[n] - b[n]).abs().max().item() for n in a)


def replicated(data: Path, out: Path, nodes: int, runs: Sequence[Run], rows_for_all: bool) -> None:
    """Be one of the replicas of `real_runs.train_on_replicas`; replica r saves OUT/weights.r.pt."""
    os.environ["LOCAL_WORLD_SIZE"] = str(int(os.environ["WORLD_SIZE"]) // nodes)
    plugins.load_all(str(ROOT / "user_dir"))
    weights = {}
    with contextlib.nullcontext() if rows_for_all else without_rows():
        for case, label, more in runs:
            config = configure(data, out / f"{case[0]}-{case[1]}-{label}", case, *more)
            weights[case, label] = train_uncounted(config)
    torch.save(weights, out / f"weights.{process_group.rank()}.pt")
    process_group.finish()


@contextlib.contextmanager
def without_rows() -> Iterator[None]:
    """Inside the block, divide rows among all replicas except the first."""
    divide = Shard.parts

    def parts(shard: Shard, count: int) -> list[np.ndarray]:
        others = Shard(shard.rank - 1, shard.world - 1, shard.micro_batch_size)
        return divide(others, count) if shard.rank else []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shard, "parts", parts)
        yield
