"""Runs PyTorch's own test cases for a backend of torch.distributed.

PyTorch spawns processes for each case. Here the ranks of one launch run all cases, each
with its own world and default process group.
"""

from __future__ import annotations

import os
import pickle
import re
import tempfile
import traceback
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from default_process_groups import meet, process_group
from mpi4py import MPI

from nbdist.collectives.torch_backend.registration import register

APPLIES = {
    "Only MPI supports CPU all_to_all_single",
    "Only MPI supports all_to_all",
    "GLOO Batch Send Recv CPU",
}
"""Reasons for which a case is skipped on backends other than those it names, and that
do not hold for this one."""
Outcome = tuple[str, str]
"""("passed", "skipped", "excluded" or "failed"; the reason)."""


def run_cases(excluded: dict[str, str]) -> dict[str, Outcome]:
    """Run every case that is not excluded. Every rank must call.

    Args:
        excluded: Reasons, by a regular expression for names. The first match counts.

    Returns:
        The outcome on this rank, by case.
    """
    with tempfile.TemporaryDirectory() as folder:
        module = _load(MPI.COMM_WORLD.bcast(folder))
        cases = _make(module)
        outcomes = {}
        for name in unittest.TestLoader().getTestCaseNames(cases):
            reason = _reason(name, excluded)
            outcomes[name] = reason or _run(cases, name, Path(os.environ["TEMP_DIR"]))
        MPI.COMM_WORLD.Barrier()  # the folder is shared
    return outcomes


def _reason(name: str, excluded: dict[str, str]) -> Outcome | None:
    for pattern, reason in excluded.items():
        if re.search(pattern, name):
            return "excluded", reason
    return None


def _load(folder: str) -> Any:
    """The module of the cases, patched so that this backend has gloo's abilities."""
    world = MPI.COMM_WORLD
    os.environ |= {
        "BACKEND": "nbdist",
        "WORLD_SIZE": str(world.size),
        "TEMP_DIR": folder,
    }
    register()
    from torch.testing._internal import common_distributed, common_utils

    features = common_distributed.DistTestCases.backend_feature
    features["ddp"].add("nbdist")
    features["plugin"].add("nbdist")
    skip_if = common_utils.skip_but_pass_in_sandcastle_if

    def skip_unless_it_applies(condition: bool, reason: str) -> Any:
        return skip_if(condition and reason not in APPLIES, reason)

    with (
        mock.patch.object(
            common_utils, "skip_but_pass_in_sandcastle_if", skip_unless_it_applies
        ),
        # It asks for 8 ranks; the cases themselves need three.
        mock.patch.object(common_distributed, "skip_if_small_worldsize", _as_it_is),
    ):
        from torch.testing._internal.distributed import distributed_test
    (Path(folder) / "test_dir").mkdir(exist_ok=True)
    world.Barrier()
    return distributed_test


def _as_it_is(case: Any) -> Any:
    return case


def _make(module: Any) -> type[Any]:
    class Cases(module.DistributedTest._DistTestBase, module.TestDistBackend):
        world_size = MPI.COMM_WORLD.size

        def _barrier(self, *_: object, **__: object) -> None:
            meet()

        def assertRaises(self, expected: Any, *args: Any, **options: Any) -> Any:
            # What pickle raises for a local class from Python 3.14 on.
            if expected is AttributeError:
                expected = AttributeError, pickle.PicklingError
            return super().assertRaises(  # noqa: PT027 - the cases are of unittest
                expected, *args, **options
            )

    return Cases


def _run(cases: type[Any], name: str, folder: Path) -> Outcome:
    case = cases(name)
    case.rank = MPI.COMM_WORLD.rank
    case.file_name = str(folder / name)
    torch.manual_seed(0)  # some cases make "equal" objects at random
    meet()
    with process_group(folder / f"{name}.store"):
        try:
            getattr(case, name)()
        except unittest.SkipTest as skip:
            return "skipped", str(skip)
        except SystemExit as skip:
            return "skipped", f"exit code {skip.code}"
        except Exception:  # noqa: BLE001 - it is the outcome
            return "failed", traceback.format_exc()
    return "passed", ""
