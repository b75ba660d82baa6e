"""A league: objectives at equal compute, with controls, gates and verdicts."""
