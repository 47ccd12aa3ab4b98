"""Lets the tests of this folder import `ranks` and `horovod_cases`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "collectives"))
