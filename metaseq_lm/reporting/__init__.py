"""Run folders -> tables and plots: runs are read, grouped into settings, counted, drawn."""
