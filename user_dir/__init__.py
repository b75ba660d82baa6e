"""SpanBERT's objective (Joshi et al. 2020) and a suite, as examples of what is outside the package."""

from . import criterion, gaps, task  # noqa: F401
