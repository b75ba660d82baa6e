"""Token files, tokenizers, labelled sets and the command that makes them."""
