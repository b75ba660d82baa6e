"""Sweeps: expand a definition into runs, launch them as jobs, and follow them by their folder."""
