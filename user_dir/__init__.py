"""Objectives as examples of plug-ins: SpanBERT's (Joshi et al. 2020), next-latent prediction, and a
joint-embedding term; a suite, a world and an optimizer.
"""

from . import criterion, gaps, hierarchy, joint_embedding, next_latent, soap, task  # noqa: F401
