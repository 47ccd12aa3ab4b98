"""The seed of what the tests draw at random. A test that fails prints it.

`NBDIST_SEED=1234 pytest FILE` repeats the draws.
"""

from __future__ import annotations

import os
import random

__all__ = ["CHOSEN", "SEED"]

CHOSEN = "NBDIST_SEED" in os.environ
SEED = int(os.environ.get("NBDIST_SEED") or random.SystemRandom().randrange(10**8))
