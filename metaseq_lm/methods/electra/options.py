"""Options of the electra methods."""

from dataclasses import dataclass

from metaseq_lm.config.criterions import BatchSumConfig
from metaseq_lm.config.tasks import (
    BatchConfig,
    CutRowsConfig,
    MaskedCorpusConfig,
    MaskingConfig,
    OneSetConfig,
)
from metaseq_lm.config.transformer import EncoderConfig, ModernConfig, TransformerConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import WEIGHTS, option, with_default
from metaseq_lm.core.registry import CRITERIONS, MODELS, TASKS, NoOptions

NOISES = ("mlm", "two_tower", "unigram", "uniform")
DIFFICULTY = "difficulty"  # not noise: guesses which tokens are hard, for strategic masking


@dataclass
class NoiseConfig:
    """Training and sampling of the noise model."""

    generator_weight: float = option(1.0, "weight of the noise model's own loss", at_least=0)
    temperature: float = option(
        1.0, "divides the logits of the noise model before sampling", above=0
    )
    disallow_correct: bool = option(False, "never sample the original token")
    noise_rate: float = option(
        0.15,
        "share of the tokens that are replaced",
        above=0,
        below=1,
        follows="task.mask_prob",
    )


@dataclass
class RTDConfig(NoiseConfig):
    """Replaced-token detection, with the weights of the authors' code."""

    discriminator_weight: float = option(50.0, "weight of the detection loss", at_least=0)
    disc_positions: str = option(
        "all",
        "tokens in the detection loss: all, masked (ELECTRA-15%) or random",
        choices=("all", "masked", "random"),
    )
    contrast: float = option(
        0.0, "share of uncorrupted rows, which a sentence-level head detects", at_least=0, below=1
    )
    contrast_weight: float = option(1.0, "weight of the loss of that head", at_least=0)
    pll_formula: str = option(
        "corrected",
        "log p of two-tower runs in score and rerank: corrected, or dissertation (biased); "
        "these commands accept it for any finished run",
        choices=("corrected", "dissertation"),
    )


@dataclass
class AdversarialConfig(NoiseConfig):
    """Weights of the losses; `generator_weight` scales the policy gradient."""

    discriminator_weight: float = option(50.0, "weight of the detection loss", at_least=0)


@dataclass
class ElectricConfig(NoiseConfig):
    """Noise-contrastive estimation of token energies."""

    discriminator_weight: float = option(50.0, "weight of the contrastive loss", at_least=0)
    exact_counts: bool = option(
        False, "log(k / (n - k)) from each row's counts; false: from noise_rate"
    )
    legacy_specials: bool = option(
        False, "the loss includes [CLS] and [SEP], as in the authors' code"
    )


@dataclass
class NoiseModelConfig(EncoderConfig):
    """An encoder and its noise model (Clark 2021, sections 5.1.5, 5.3.1 and 5.3.2)."""

    noise: str = option(
        "mlm",
        "noise model: mlm, two_tower, unigram (corpus frequencies) or uniform; difficulty: "
        "strategic masking",
        choices=(*NOISES, DIFFICULTY),
        affects=WEIGHTS,
    )
    generator_size: float = option(
        0.25,
        "width of the noise model divided by the encoder's",
        above=0,
        affects=WEIGHTS,
    )
    generator_layers: float = option(
        1.0,
        "depth of the noise model divided by the encoder's",
        above=0,
        affects=WEIGHTS,
    )
    generator_embed_dim: int = option(
        0,
        "width of the noise model's embeddings with sharing=none (0 = its width)",
        at_least=0,
        affects=WEIGHTS,
    )
    sharing: str = option(
        "embeddings",
        "parameters shared with the noise model: embeddings, none or all",
        choices=("embeddings", "none", "all"),
        affects=WEIGHTS,
    )
    freeze_generator: bool = option(
        False,
        "do not train the noise model (second stage of two-stage training)",
        affects=WEIGHTS,
    )

    def check(self) -> None:
        """Raise UsageError for sizes that are too small or cannot be shared."""
        same = self.generator_size == 1 and self.generator_layers == 1 and self.noise == "mlm"
        if self.sharing == "all" and not same:
            raise UsageError(
                "model.sharing=all makes generator and discriminator one encoder; it needs "
                "model.noise=mlm, model.generator_size=1 and model.generator_layers=1"
            )
        for name, size in (
            ("generator_size", round(self.encoder_embed_dim * self.generator_size)),
            ("generator_layers", round(self.encoder_layers * self.generator_layers)),
        ):
            if size < 1:
                raise UsageError(
                    f"model.{name} is {getattr(self, name)}, which makes a width or depth of "
                    f"{size}; make it larger"
                )
        if self.freeze_generator and self.sharing != "none":
            raise UsageError("model.freeze_generator needs model.sharing=none: a copy of its own")

    def generator(self) -> EncoderConfig:
        """Return the noise model's sizes; width, heads and feed-forward width scale together."""
        width = round(self.encoder_embed_dim * self.generator_size)
        layers = round(self.encoder_layers * self.generator_layers)
        # A frozen noise model is a copy of the first stage's, including embeddings.
        separate = self.sharing == "none" and not self.freeze_generator
        embed_dim = self.generator_embed_dim if separate else self.embed_dim
        return self.resized(width, layers, embed_dim)


# The encoder comes first, so that its defaults win for options that both define.
@dataclass
class ElectraConfig(TransformerConfig, NoiseModelConfig):
    """An encoder with learned positions and its noise model."""


@dataclass
class _ModernElectraConfig(ModernConfig, NoiseModelConfig):
    """A modern encoder and its noise model."""


@dataclass
class StrategicConfig:
    """The net that predicts difficulty, and its influence on the choice of tokens."""

    difficulty_weight: float = option(1.0, "weight of the loss of that network", at_least=0)
    sharpness: float = option(
        1.0, "tokens are drawn in proportion to the guess to this power (0: all alike)", at_least=0
    )


@dataclass
class ElectraTaskConfig(MaskedCorpusConfig):
    """Corpus and masks: 15 % of tokens, of which 85 % become [MASK], 15 % stay (authors' code)."""

    batch_size: int = with_default(BatchConfig, "batch_size", 128)
    random_token_prob: float = with_default(MaskingConfig, "random_token_prob", 0.0)
    leave_unmasked_prob: float = with_default(MaskingConfig, "leave_unmasked_prob", 0.15)


@dataclass
class WnliTaskConfig(CutRowsConfig, OneSetConfig):
    """Data of the set glue/WNLI; a sample has about ten rows (defaults: Clark et al. 2020)."""


TASKS.declare(
    "electra",
    ElectraTaskConfig,
    "metaseq_lm.methods.electra.task.ElectraTask",
    takes=(
        "all_tokens_mlm",
        "electra_adversarial",
        "electra_rtd",
        "electric_nce",
        "replace_mlm",
        "strategic_mlm",
        "two_tower_cloze",
    ),
)
TASKS.declare("wnli", WnliTaskConfig, "metaseq_lm.methods.electra.wnli.WnliTask", takes=("wnli",))
CRITERIONS.declare(
    "electra_rtd", RTDConfig, "metaseq_lm.methods.electra.criterion.ReplacedTokenDetection"
)
CRITERIONS.declare("replace_mlm", NoiseConfig, "metaseq_lm.methods.electra.criterion.ReplaceMLM")
CRITERIONS.declare(
    "all_tokens_mlm", NoiseConfig, "metaseq_lm.methods.electra.criterion.AllTokensMLM"
)
CRITERIONS.declare(
    "electra_adversarial",
    AdversarialConfig,
    "metaseq_lm.methods.electra.criterion.AdversarialElectra",
)
CRITERIONS.declare("electric_nce", ElectricConfig, "metaseq_lm.methods.electra.criterion.Electric")
CRITERIONS.declare(
    "two_tower_cloze", NoOptions, "metaseq_lm.methods.electra.criterion.TwoTowerCloze"
)
CRITERIONS.declare(
    "strategic_mlm", StrategicConfig, "metaseq_lm.methods.electra.strategic.StrategicMLM"
)
CRITERIONS.declare("wnli", BatchSumConfig, "metaseq_lm.methods.electra.wnli.Wnli")
MODELS.declare("electra", ElectraConfig, "metaseq_lm.methods.electra.model.Electra")
MODELS.declare(
    "modern_electra", _ModernElectraConfig, "metaseq_lm.methods.electra.model.ModernElectra"
)
