"""Sweeps: a definition becomes runs, the runs become jobs, and their folder tells how they fare."""
