"""Sweeps: a definition is expanded into runs, launched as jobs, and followed by their folder."""
