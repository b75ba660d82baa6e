from metaseq_lm.cli import program

program()
