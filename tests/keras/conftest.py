"""Lets the tests of this folder import `ranks` and `horovod_cases`."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS / "collectives"))
sys.path.insert(0, str(TESTS / "horovod"))
