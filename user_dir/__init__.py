"""Span masking (after SpanBERT, Joshi et al. 2020): a complete small method outside the package."""

from . import criterion, task  # noqa: F401
