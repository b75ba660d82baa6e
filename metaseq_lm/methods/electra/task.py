"""Corpus, masks and nets of the ELECTRA family; the update is the default one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.output import show
from metaseq_lm.data.corpus.packing import open_corpus
from metaseq_lm.data.streams import Stream
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.distributed import process_group
from metaseq_lm.engine.engine import Engine
from metaseq_lm.methods.electra.criterion import Corrupting, TwoTowerCloze
from metaseq_lm.methods.electra.data import ElectraRows
from metaseq_lm.methods.electra.model import check_noise
from metaseq_lm.methods.electra.options import DIFFICULTY, ElectraTaskConfig, NoiseModelConfig
from metaseq_lm.methods.electra.strategic import StrategicMLM
from metaseq_lm.models.transformer import flops_rules
from metaseq_lm.tasks import Passes, Scored, Task
from metaseq_lm.tasks.masked_lm import (
    build_transformer,
    changes_size,
    mask_rates,
    masked_stream,
    masking_of,
    units_of,
)


class ElectraTask(Task):
    """One stream of rows with chosen positions; the criterion decides the heads of the model."""

    exported = True
    criterion: Corrupting | TwoTowerCloze | StrategicMLM
    criterions = (Corrupting, TwoTowerCloze, StrategicMLM)
    # Heads start fresh in the second of two stages; the frequencies come from the corpus.
    fresh: tuple[str, ...] = ("heads.", "generator.log_probs")

    def __init__(self, config: ElectraTaskConfig, run_config: RunConfig) -> None:
        super().__init__(config, run_config)
        self.vocabulary = Vocabulary.load(self.data / "dict.txt")
        if not isinstance(run_config.model, NoiseModelConfig):
            raise UsageError(
                f"task electra needs model=electra or model=modern_electra, not "
                f"{run_config.model._name}"
            )
        run_config.model.check()
        is_fixed = not getattr(self.criterion.config, "exact_counts", True)
        if is_fixed and mask_rates(config, run_config) is not None:
            raise UsageError(
                "criterion electric_nce compares energies with log(k / (n - k)) of one noise rate, "
                "but task.mask_rates changes it; use criterion.exact_counts=true"
            )
        self.heads = self.criterion.heads
        check_noise(run_config.criterion._name, self.criterion.noises, run_config.model.noise)

    @classmethod
    def prepare(cls, config: RunConfig) -> RunConfig:
        if getattr(config.model, "freeze_generator", False) and not config.init_from:
            raise UsageError(
                "model.freeze_generator=true freezes the generator of init_from; give the run of "
                "the first stage as init_from"
            )
        return config

    # ---------------------------------------------------------------- data and nets

    def build_streams(self, split: str) -> dict[str, Stream]:
        vocabulary, seed = self.vocabulary, self.run_config.seed
        corpus = open_corpus(self.data, split, vocabulary, self.config, seed)
        judged = getattr(self.criterion.config, "disc_positions", "all")
        # With a random count the samples would depend on the split into micro-batches.
        units = units_of(self.config, self.data)
        masking = masking_of(self.config, vocabulary, split, "nearest", self.config, units)
        rows = ElectraRows(corpus, has_subset=judged == "random")
        return {split: masked_stream(self, split, corpus, masking, rows.batch)}

    def build_model(self) -> nn.Module:
        counts = torch.tensor(self.vocabulary.text_counts, dtype=torch.get_default_dtype())
        nets = {"heads": self.heads, "frequencies": counts}
        return build_transformer(self.run_config, self.vocabulary, **nets)

    def flops_by_rule(self) -> float | None:
        if changes_size(self.run_config) or not flops_rules.has_ruled_parts(self.run_config.model):
            return None
        model, vocab = self.run_config.model, len(self.vocabulary)
        length = self.config.tokens_per_sample
        main = flops_rules.Sizes.of(model, vocab, length)
        small = flops_rules.Sizes.of(model.generator(), vocab, length)
        noise = {
            "mlm": flops_rules.masked_lm(small),
            "two_tower": flops_rules.two_towers(small),
            DIFFICULTY: small.passes * flops_rules.classifier_flops(small),
        }.get(model.noise, 0.0)
        row = {
            (): 0.0,
            ("lm",): flops_rules.masked_lm(main),
            ("lm", "copy"): flops_rules.masked_lm(main, share=1.0),
        }.get(self.heads, main.passes * flops_rules.classifier_flops(main))
        if model.freeze_generator:
            noise /= small.passes  # it only runs forward
        flops: float = self.config.batch_size * (noise + row)
        return flops

    def pretrained(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Load the weights of a run of this task, or only its encoder from another run.

        The encoder of a masked LM or discriminator becomes the main encoder; a detection head is
        kept, other heads start fresh. A generator of the same sizes also starts from the masked LM
        and its head (second stage of Clark 2021, section 5.3.3). Other noise models start fresh;
        UsageError if they are frozen.
        """
        if any(name.startswith("generator.") for name in weights):
            return {n: w for n, w in weights.items() if n != "generator.log_probs"}
        heads = [f"heads.{name}." for name in self.heads if name == "rtd"]
        prefixes = ("encoder.", *heads) if self.heads else ()
        chosen = {n: w for n, w in weights.items() if n.startswith(prefixes)}
        model = self.run_config.model
        small, lm = model.generator(), "heads.lm."
        sizes = ("encoder_layers", "encoder_embed_dim", "embed_dim")
        same = all(getattr(small, name) == getattr(model, name) for name in sizes)
        head = {n.replace(lm, "generator.head."): w for n, w in weights.items() if n.startswith(lm)}
        if head and same and model.noise == "mlm":
            # Parameters that the generator shares exist once, in the main encoder.
            shared = {"all": ("encoder.",), "embeddings": ("encoder.embeddings.",)}
            left_out = shared.get(model.sharing, ())
            generator = {}
            for name, weight in weights.items():
                if name.startswith("encoder.") and not name.startswith(left_out):
                    generator[name.replace("encoder", "generator", 1)] = weight
            return chosen | head | generator
        if model.freeze_generator:
            raise UsageError(
                "model.freeze_generator=true freezes the generator of init_from, which is no "
                "masked LM of the generator's sizes; give the run of the first stage, "
                "model.generator_size=1 and model.generator_layers=1"
            )
        if model.noise in ("mlm", "two_tower", DIFFICULTY) and not process_group.rank():
            show(
                f"{self.run_config.init_from}: nothing in it fits the noise "
                "model, which starts fresh"
            )
        self.fresh = (*self.fresh, "generator.")
        return chosen

    # ---------------------------------------------------------------- validation

    def evaluate(self, engine: Engine, model: nn.Module, passes: Passes) -> Scored:
        """Return the terms, and precision and recall of the fakes."""
        logs = super().evaluate(engine, model, passes).metrics
        if logs.get("fakes"):
            logs["recall"] = logs["caught"] / logs["fakes"]
        if "caught" in logs:
            logs["precision"] = logs["caught"] / max(logs["flagged"], 1e-12)
        return Scored(logs)
