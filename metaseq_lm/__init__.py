"""A workbench for language-model pre-training objectives."""

__version__ = "0.2.0"
