"""The objectives that have a page in docs/objectives: what its pictures and tables are made of.

For a new page add an Objective to CATALOGUE, name the page in mkdocs.yml, and write
docs/objectives/NAME.md with the comments `<!-- defaults: NAME -->` and `<!-- cost: NAME -->`, which
tables replace, and an image `![](pictures/PICTURE.svg)` for each of its pictures. Then run `python
docs/objective_pictures.py`. Objectives of user_dir/ can be added as well.
"""

from dataclasses import dataclass, field

TEXT, DOCUMENTS = "text", "documents"  # the corpora that pictures are drawn of
ENCODER, GENERATOR, DECODER = "encoder.stack", "generator.stack", "decoder"
TOWERS = "generator"  # the left tower and the right one together


@dataclass(frozen=True)
class Panel:
    """One attention mask of a picture.

    Attributes:
        title: What it shows; {weight} in it is the weight of the row's losses.
        net: The net whose attention it is.
        row: The number of the row in the batch, or among those of its objective in a mixture.
        part: The number of its objective in a mixture.
    """

    title: str
    net: str = ENCODER
    row: int = 0
    part: int = 0


@dataclass(frozen=True)
class Picture:
    """A picture of the first training batch of a task.

    Attributes:
        name: Name of its file.
        panels: The masks, from top to bottom.
        options: Options besides those of the objective; the picture names them.
        corpus: TEXT, rows of one sentence, or DOCUMENTS, a row of two documents.
        seed: The seed of the run.
    """

    name: str
    panels: tuple[Panel, ...]
    options: tuple[str, ...] = ()
    corpus: str = TEXT
    seed: int = 1


@dataclass(frozen=True)
class Objective:
    """An objective with a page.

    Attributes:
        name: Name of its page.
        options: Those that choose it.
        keys: The options in its table of defaults.
        costs: The rows of its table of costs: a label, and options besides those of the objective;
            the first is in the index. None if no rule counts its FLOPs.
        pictures: Its pictures.
        task_tokens: Symbols [CLSn] of the vocabulary that its cost is computed with.
    """

    name: str
    options: tuple[str, ...]
    keys: tuple[str, ...] = ()
    costs: dict[str, tuple[str, ...]] = field(default_factory=lambda: {"defaults": ()})
    pictures: tuple[Picture, ...] = ()
    task_tokens: int = 4


def masked(*options: str) -> tuple[str, ...]:
    """Return options of a picture with masks: all targets are [MASK]."""
    return (*options, "task.random_token_prob=0", "task.leave_unmasked_prob=0")


def mixture(*entries: str, phases: str = "") -> tuple[str, ...]:
    """Return options of a mixture of objectives."""
    objectives = ",".join(f'"{entry}"' for entry in entries)
    return (f"task.objectives=[{objectives}]", *([f"task.phases={phases}"] if phases else []))


MODERN, TWO_SIDED = "model=modern", "model=modern_electra"
MIXTURE = ("task=mixture", "criterion=mixture")
DIFFUSION = ("task=masked_diffusion", "criterion=masked_diffusion", MODERN)
DUAL = mixture("masked_diffusion criterion.shifted=true", "causal_lm")
SPANS = ("task=span_corruption", "criterion=span_corruption")
# Of a sentence of 8 tokens 3 are noise, in 2 spans.
NOISE = ("task.noise_density=0.4", "task.mean_span=1.5")

CATALOGUE = (
    Objective(
        "causal_lm",
        ("task=causal_lm", "criterion=causal_lm", MODERN),
        (
            *("task.sample_break_mode", "task.tokens_per_sample"),
            *("criterion.z_loss", "criterion.label_smoothing"),
        ),
        pictures=(
            Picture("causal_lm", (Panel("one sentence"),)),
            Picture(
                "causal_lm_documents",
                (Panel("two documents in a row"),),
                ("task.sample_break_mode=documents",),
                DOCUMENTS,
            ),
        ),
    ),
    Objective(
        "prefix_lm",
        ("task=prefix_lm", "criterion=prefix_lm", MODERN),
        (
            *("task.sample_break_mode", "task.tokens_per_sample", "criterion.read"),
            *("criterion.z_loss", "criterion.label_smoothing"),
        ),
        pictures=(
            Picture("prefix_lm", (Panel("a prefix, and what follows it"),), seed=8),
            Picture(
                "prefix_lm_documents",
                (Panel("two documents in a row"),),
                ("task.sample_break_mode=documents",),
                DOCUMENTS,
                seed=7,
            ),
        ),
    ),
    Objective(
        "masked_lm",
        ("task=masked_lm", "criterion=masked_lm", MODERN),
        (
            *("task.mask_prob", "task.random_token_prob", "task.leave_unmasked_prob"),
            *("task.mask_unit", "task.mean_span", "task.longest_span", "task.span_anchors"),
            *(
                "task.mask_rates",
                "task.mask_phases",
                "task.mask_updates",
                "task.mask_rounding",
                "task.mask_rarity",
            ),
            *("task.legacy_duplicates", "criterion.z_loss", "criterion.label_smoothing"),
        ),
        {
            "15 %": (),
            "30 %": ("task.mask_prob=0.3",),
            "40 %": ("task.mask_prob=0.4",),
            "30 % falling to 15 %": ("task.mask_rates=[0.3,0.15]",),
            "30, 15, 5 % by phases": (
                "task.mask_rates=[0.3,0.15,0.05]",
                "task.mask_phases=[0.8,0.15,0.05]",
            ),
        },
        (
            Picture("masked_lm", (Panel("single tokens"),), ("task.mask_prob=0.4",), seed=7),
            Picture(
                "masked_words",
                (Panel("whole words"),),
                masked("task.mask_prob=0.4", "task.mask_unit=word"),
            ),
            Picture(
                "masked_spans",
                (Panel("spans, two documents in a row"),),
                masked(
                    *("task.mask_prob=0.4", "task.mask_unit=span"),
                    "task.sample_break_mode=documents",
                ),
                DOCUMENTS,
            ),
        ),
    ),
    Objective(
        "masked_next_token",
        ("task=masked_next_token", "criterion=masked_next_token", MODERN),
        (
            *("task.mask_prob", "task.random_token_prob", "task.leave_unmasked_prob"),
            *("task.mask_unit", "task.mask_rates", "task.mask_phases", "task.mask_updates"),
            *("criterion.z_loss", "criterion.label_smoothing"),
        ),
        {"15 %": (), "30 %": ("task.mask_prob=0.3",)},
        (Picture("masked_next_token", (Panel("a masked row"),), masked("task.mask_prob=0.4")),),
    ),
    Objective(
        "gpt_bert",
        (*MIXTURE, MODERN),
        ("task.objectives", "criterion.read"),
        {
            "1/16 causal, 15 %": mixture("masked_next_token weight=15", "causal_lm weight=1"),
            "1/16 causal, 30 %": mixture(
                "masked_next_token weight=15 task.mask_prob=0.3", "causal_lm weight=1"
            ),
            "1/2 causal, 30 %": mixture("masked_next_token task.mask_prob=0.3", "causal_lm"),
        },
        (
            Picture(
                "gpt_bert",
                (Panel("a masked row"), Panel("a causal row", part=1)),
                mixture(
                    " ".join(["masked_next_token", *masked("task.mask_prob=0.4")]), "causal_lm"
                ),
            ),
        ),
    ),
    Objective(
        "masked_diffusion",
        DIFFUSION,
        (
            *("task.times", "task.weights", "criterion.shifted"),
            *("criterion.score_samples", "criterion.score_seed"),
            *("criterion.z_loss", "criterion.label_smoothing"),
        ),
        {
            "diffusion": (),
            "1/2 causal": (*MIXTURE, *DUAL),
        },
        (
            Picture(
                "masked_diffusion",
                (
                    Panel("few masks: weight 1 / t = {weight}"),
                    Panel("many masks: weight 1 / t = {weight}", row=1),
                ),
                seed=3,
            ),
            Picture(
                "masked_diffusion_causal",
                (Panel("a masked row"), Panel("a causal row", part=1)),
                (*MIXTURE, *DUAL),
            ),
        ),
    ),
    Objective(
        "mixture",
        (*MIXTURE, MODERN),
        ("task.objectives", "task.phases", "task.phase_updates", "criterion.read"),
        {
            "1/4 causal, 3/4 masked": mixture("causal_lm weight=1", "masked_lm weight=3"),
            "causal, then masked": mixture(
                "causal_lm weight=[1,0]", "masked_lm weight=[0,1]", phases="[1,3]"
            ),
            "4 causal, 16 masked, 4 causal": mixture(
                "causal_lm weight=[1,0,1]", "masked_lm weight=[0,1,0]", phases="[4,16,4]"
            ),
        },
        (
            Picture(
                "mixture",
                (
                    Panel("a causal row"),
                    Panel("a row with a prefix", part=1),
                    Panel("a masked row", part=2),
                ),
                mixture("causal_lm", "prefix_lm", "masked_lm task.mask_prob=0.4"),
                seed=8,
            ),
        ),
    ),
    Objective(
        "span_corruption",
        (*SPANS, MODERN),
        (
            *("task.noise_density", "task.mean_span", "task.tokens_per_sample"),
            *("task.inputs_length", "task.denoisers", "task.random_roll"),
            *("criterion.z_loss", "criterion.label_smoothing"),
        ),
        {
            "one Transformer": (),
            "an encoder-decoder": ("model=modern_encoder_decoder",),
        },
        (
            Picture("span_corruption", (Panel("one Transformer"),), NOISE),
            Picture(
                "span_corruption_decoder",
                (Panel("encoder"), Panel("decoder, which sees the encoder", DECODER)),
                ("model=modern_encoder_decoder", *NOISE),
            ),
        ),
    ),
    Objective(
        "ul2",
        ("task=ul2", "criterion=span_corruption", MODERN),
        ("task.denoisers", "task.tokens_per_sample", "task.inputs_length", "task.random_roll"),
        pictures=(
            Picture(
                "ul2",
                (Panel("R: short spans"), Panel("S: the end", row=1), Panel("X: half", row=2)),
                seed=8,
            ),
        ),
        task_tokens=10,
    ),
    Objective(
        "replaced_tokens",
        ("task=electra", "criterion=electra_rtd", TWO_SIDED),
        (
            *("task.mask_prob", "task.random_token_prob", "task.leave_unmasked_prob"),
            *("model.noise", "model.generator_size", "model.generator_layers", "model.sharing"),
            *("criterion.generator_weight", "criterion.discriminator_weight"),
            *("criterion.disc_positions", "criterion.temperature", "criterion.disallow_correct"),
            *("criterion.contrast", "criterion.contrast_weight", "criterion.pll_formula"),
        ),
        {
            "electra_rtd": (),
            "electra_rtd, unigram noise": ("model.noise=unigram",),
            "replace_mlm": ("criterion=replace_mlm",),
            "all_tokens_mlm": ("criterion=all_tokens_mlm",),
        },
        (
            Picture(
                "replaced_tokens",
                (Panel("generator", GENERATOR), Panel("discriminator")),
                ("task.mask_prob=0.3",),
                seed=11,
            ),
            Picture(
                "replace_mlm",
                (Panel("replace_mlm, main encoder"),),
                ("criterion=replace_mlm", "task.mask_prob=0.3"),
                seed=11,
            ),
            Picture(
                "all_tokens_mlm",
                (Panel("all_tokens_mlm, main encoder"),),
                ("criterion=all_tokens_mlm", "task.mask_prob=0.3"),
                seed=11,
            ),
        ),
    ),
    Objective(
        "electric",
        ("task=electra", "criterion=electric_nce", TWO_SIDED, "model.noise=two_tower"),
        (
            *("task.mask_prob", "model.generator_size", "model.generator_layers", "model.sharing"),
            *("criterion.generator_weight", "criterion.discriminator_weight"),
            *("criterion.exact_counts", "criterion.legacy_specials"),
        ),
        {"two towers": (), "unigram noise": ("model.noise=unigram",)},
        (
            Picture(
                "electric",
                (Panel("the towers together", TOWERS), Panel("main encoder")),
                ("task.mask_prob=0.3",),
                seed=11,
            ),
        ),
    ),
)
