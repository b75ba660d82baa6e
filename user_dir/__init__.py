"""Objectives as examples of plug-ins: SpanBERT's (Joshi et al. 2020), next-latent prediction, and a
joint-embedding term; a suite, a world, an optimizer and two attentions.
"""

from . import (  # noqa: F401
    criterion,
    differential,
    gaps,
    grouped_query,
    hierarchy,
    joint_embedding,
    next_latent,
    soap,
    task,
)
