import sys

from metaseq_lm.cli import main

sys.exit(main())
