"""Cross-View Training (Clark et al. 2018; Clark 2021, chapter 4)."""

from metaseq_lm.methods.cvt import options
