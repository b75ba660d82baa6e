"""The sum of the losses of several labelled sets (Lv et al. 2020, supervised pre-training).

The text tasks use ordinary criterions: bert_pretraining, masked_lm, language_modeling. The options
of meta-learning belong to the task, because only the updates differ (see update.py).
"""

import torch
from torch import nn

from metaseq_lm.core.batch import Term, Terms, TokenBatch
from metaseq_lm.criterions import Criterion, Exported
from metaseq_lm.forward.passes import full_precision
from metaseq_lm.models.layers import cross_entropy

PAIRS = "meta_pretrain_pairs"  # the name of the task and of its criterion


class LabelledSets(Criterion):
    """The mean cross-entropy over the rows of each set in the batch, summed over the sets.

    A micro-batch holds rows of one set; `batch.head` is the name of the set.
    """

    exported = Exported(heads=("sentence",))  # the head of the chosen set
    tasks = (PAIRS,)

    def __call__(self, model: nn.Module, batch: TokenBatch) -> Terms:
        name, targets = batch.head, batch.targets
        assert name is not None and targets is not None
        outputs = model(batch.tokens, batch.layout, batch.segments, [name])
        scores = full_precision(outputs[name])  # (B, K)
        with torch.no_grad():
            correct = (scores.argmax(-1) == targets).sum().to(scores.dtype)
        return {
            f"loss_{name}": Term(cross_entropy(scores, targets).sum(), name),
            f"accuracy_{name}": Term(correct, name, weight=0.0),
        }
