"""BAM: several labelled sets at once, taught by models of one or all sets (Clark et al. 2019).

  metaseq-lm train DATA --task bam --criterion bam_distill 'task.labelled=[CoLA,RTE]' \
      init_from=RUN 'task.teachers=[runs/CoLA,runs/RTE]'

Start with criterion.py (the target, teacher annealing); then data.py (mixed batches, and
how often each set is seen), teachers.py (computing and storing outputs of teachers) and task.py.
"""

from metaseq_lm.methods.bam import options
