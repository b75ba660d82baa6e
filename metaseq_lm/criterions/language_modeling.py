"""Language modelling in both directions: cross-entropy of the next and of the previous token.

Shapes: B rows, S length.
"""

from torch import Tensor, nn

from metaseq_lm.core.batch import Batch, Term, Terms
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.criterions import Criterion
from metaseq_lm.criterions.masked_lm import IGNORE, cross_entropy
from metaseq_lm.models.bilstm import BiLSTMLM


def inside(wanted: Tensor, padding: Tensor | None) -> Tensor:
    """Return the targets `wanted` (B, S - 1) without those at or after which padding (B, S) begins."""
    return wanted if padding is None else wanted.masked_fill(padding[:, 1:], IGNORE)


@register_criterion("language_modeling")
class LanguageModeling(Criterion):
    """The mean of the forward and the backward loss per token (Peters et al. 2018, equation of 3.1).

    In a row `[CLS] x [SEP]` the forward direction predicts x and [SEP], the backward one x and
    [CLS]. The model is a BiLSTMLM; UsageError for another.
    """

    def __call__(self, model: nn.Module, batch: Batch) -> Terms:
        if not isinstance(model, BiLSTMLM):
            raise UsageError("criterion language_modeling needs --model bilstm_lm")
        tokens, padding = batch.tokens, batch.padding
        ahead, back = model.directions(tokens, padding)
        wanted = model.encoder.known(tokens)
        following = inside(wanted[:, 1:], padding)
        previous = inside(wanted[:, :-1], padding)
        return {
            "forward": Term(cross_entropy(ahead, following).sum(), "targets", 0.5),
            "backward": Term(cross_entropy(back, previous).sum(), "targets", 0.5),
        }
