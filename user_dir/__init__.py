"""SpanBERT's objective (Joshi et al. 2020), as an example of a method outside the package."""

from . import criterion, task  # noqa: F401
