"""The model of the supervised setting (Lv et al. 2020): a linear head on [CLS] per labelled set."""

from collections.abc import Mapping

from metaseq_lm.config.transformer import EncoderConfig
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.models.transformer.classifiers import LabelledSetsModel, SetHeads


def labelled_sets_model(
    config: EncoderConfig, vocabulary: Vocabulary, classes: Mapping[str, int]
) -> LabelledSetsModel:
    """Return an encoder with a linear head for each set; `classes` are their numbers of classes."""
    heads = SetHeads(config.encoder_embed_dim, classes, config.dropout, pooled=False)
    return LabelledSetsModel(config, len(vocabulary), vocabulary.pad, heads)
