"""SpanBERT's objective (Joshi et al. 2020) and a suite, as examples of plug-ins."""

from . import criterion, gaps, task  # noqa: F401
