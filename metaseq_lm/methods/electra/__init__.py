"""ELECTRA and Electric: discriminators against a noise model (Clark et al. 2020; Clark 2021, 5)."""

from metaseq_lm.methods.electra import options
