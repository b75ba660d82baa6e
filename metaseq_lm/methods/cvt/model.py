"""The auxiliary modules of Cross-View Training on words (Clark et al. 2018, code).

Their nets, and the primary modules, are the core's (models/words/prediction_modules.py, parsing_heads.py); here
stands what each of them sees.
"""

from __future__ import annotations

from typing import Any

from metaseq_lm.data.words.sets import TREES
from metaseq_lm.models.words.prediction_modules import AHEAD, BACK, FULL

# Options of a TaggingModule: its view, and whose class it predicts at t, that of t + shift. At t
# "future" and "past" do not know the word in question; "full" sees what the primary module sees, but
# through dropout.
TAGGING: dict[str, dict[str, Any]] = {
    "full": {"view": FULL, "linear": True},
    "forwards": {"view": AHEAD},
    "backwards": {"view": BACK},
    "future": {"view": AHEAD, "shift": 1},
    "past": {"view": BACK, "shift": -1},
}
# Options of a ParsingModule: the views of the candidate and of the word whose head is sought.
PARSING: dict[str, dict[str, Any]] = {
    "full": {"views": (FULL, FULL)},
    "fw_fw": {"views": (AHEAD, AHEAD)},
    "fw_bw": {"views": (AHEAD, BACK)},
    "bw_fw": {"views": (BACK, AHEAD)},
    "bw_bw": {"views": (BACK, BACK)},
}


def auxiliaries(form: str) -> dict[str, dict[str, Any]]:
    """Return the options of all auxiliary modules of sets of a form, tags or trees."""
    return PARSING if form == TREES else TAGGING
