"""SpanBERT's objective (Joshi et al. 2020), a suite and a world, as examples of plug-ins."""

from . import criterion, gaps, hierarchy, task  # noqa: F401
