"""Student and teacher: encoders of equal size (paper section 3, appendix A).

The student has one head, tied to its embedding. The teacher has two untied ones on one encoder: "x"
for the input it invents, "y" for the target.
"""

from omegaconf import DictConfig
from torch import nn

from metaseq_lm.data.vocabulary import Vocabulary
from metaseq_lm.models.transformer import TransformerLM
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
