"""Models and tokenizers to and from folders of the transformers library, which is not needed for it."""
