"""Models and tokenizers to and from folders of the transformers library, without it."""
