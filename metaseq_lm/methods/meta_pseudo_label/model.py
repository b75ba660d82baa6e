"""Student and teacher: encoders of equal size (paper section 3, appendix A).

The student has one head, tied to its embedding. The teacher has two untied ones on one encoder: "x"
for the input it invents, "y" for the target.
"""

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.func import functional_call

from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.models.layers import Embedding
from metaseq_lm.models.transformer.encoder import TransformerLM
from metaseq_lm.tasks.masked_lm import build_transformer


def build_pair(config: DictConfig, vocabulary: Vocabulary) -> nn.ModuleDict:
    """Return the nets "student" and "teacher"."""
    return nn.ModuleDict(
        {
            "student": build_transformer(config, vocabulary),
            "teacher": build_transformer(config, vocabulary, heads=("x", "y"), tied=False),
        }
    )


def student_of(model: nn.Module) -> TransformerLM:
    """Return the student of a pair."""
    student = model.get_submodule("student")
    assert isinstance(student, TransformerLM)
    return student


def teacher_of(model: nn.Module) -> TransformerLM:
    """Return the teacher of a pair."""
    teacher = model.get_submodule("teacher")
    assert isinstance(teacher, TransformerLM)
    return teacher


class VirtualModel:
    """Calls `module` with weights taken from a vector (..., P), or from vectors of several copies (C, P).

    The vector holds the parameters in the order of `module.named_parameters()`, a tied one once.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        named = dict(module.named_parameters())
        self.names = list(named)
        self.parameters = list(named.values())
        self.shapes = [p.shape for p in self.parameters]
        self.sizes = [p.numel() for p in self.parameters]
        # What the input side sees of the padding row does not follow a virtual step.
        self.constants = {
            f"{name}.padding_row": layer.weight[layer.padding_idx].detach().clone()
            for name, layer in module.named_modules()
            if isinstance(layer, Embedding) and layer.padding_idx is not None
        }

    def vector(self) -> Tensor:
        """Return a detached copy of the module's present parameters, (P,)."""
        return torch.cat([p.detach().reshape(-1) for p in self.parameters])

    def split(self, vector: Tensor) -> list[Tensor]:
        """Return the views of `vector` (..., P) that stand for the parameters."""
        lead = vector.shape[:-1]
        pieces = vector.split(self.sizes, dim=-1)
        return [piece.view(*lead, *shape) for piece, shape in zip(pieces, self.shapes)]

    def __call__(self, vector: Tensor, *args: object, **kwargs: object) -> Tensor:
        weights = dict(zip(self.names, self.split(vector))) | self.constants
        output: Tensor = functional_call(self.module, weights, args, kwargs)
        return output
