"""Sentences of words: vocabularies of whole words, tagged sets, treebanks, unlabelled text."""
