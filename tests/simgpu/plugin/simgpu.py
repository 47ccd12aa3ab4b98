"""Loads the operators of the simulated GPU when torch is imported under `run.sh`."""

import atexit
import ctypes
import os


def autoload() -> None:
    """torch calls it at the end of its import (entry point group "torch.backends")."""
    library = os.environ.get("SIMGPU_LIB")
    if library:
        import torch

        torch.ops.load_library(library)
        atexit.register(ctypes.CDLL(None).simgpu_end)
