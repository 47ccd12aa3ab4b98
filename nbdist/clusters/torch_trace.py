"""Writes the ranks' collectives in the format of torch's flight recorder.

`torch.distributed.flight_recorder.fr_trace` reads a folder with one pickled file per
rank. The file has the collectives of one generation of the world. torch's analyzer
matches collectives by their number; it cannot match messages that are not part of a
batch, so that messages are left out.
"""

from __future__ import annotations

import ast
import os
import pickle
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.errors import UsageError
from nbdist.ipc.atomic_files import write_atomically
from nbdist.ipc.flight_record import RecordedCall

if TYPE_CHECKING:
    from nbdist.clusters.collective_history import HistoryRow

__all__ = ["checked_folder", "write_traces"]

VERSION = "2.10"
"""The version of the format."""
BACKEND = "gloo"
"""The analyzer accepts the names of torch's own backends only."""
KNOWN = {
    "all_gather": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "gather": "gather",
    "new_group": "split",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "scatter": "scatter",
}
"""torch's names of the operations. The analyzer accepts no other; other operations are
"barrier", with their own name in the frame."""
STATES = {
    "scheduled": "scheduled",
    "running": "started",
    "failed": "started",
    "done": "completed",
}


def checked_folder(folder: str | os.PathLike[str]) -> Path:
    """The path of a folder for the files, which does not exist or is empty.

    Raises:
        UsageError: There is something else.
    """
    path = Path(folder).expanduser()
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UsageError(
            f"{path} exists and is not an empty folder: name another one, because "
            "torch's analyzer reads every file in it"
        )
    return path


def write_traces(
    folder: Path, rows: Sequence[HistoryRow], clock_offset_ns: int
) -> list[Path]:
    """Write a file for each rank of the rows' last generation, or of the parted one.

    Args:
        folder: A folder as of `checked_folder`.
        rows: The rows of one generation. Rows of which a rank's call is not known are
            left out, because the analyzer would call the rank missing.
        clock_offset_ns: The epoch's time minus the monotonic clock's.

    Raises:
        OSError: A file cannot be written.
    """
    known = [
        row
        for row in rows
        if not row.is_message and {*row.calls, *row.missing} == {*row.members}
    ]
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for rank in sorted({rank for row in rows for rank in row.members}):
        mine = [row for row in known if rank in row.calls]
        trace = {
            "version": VERSION,
            "pg_config": {
                str(row.group): _group(row) for row in rows if rank in row.members
            },
            "entries": [
                _entry(index, row, row.calls[rank], clock_offset_ns)
                for index, row in enumerate(mine)
            ],
        }
        path = folder / f"nbdist_rank_{rank}"
        write_atomically(path, partial(pickle.dump, trace), durable=False)
        paths.append(path)
    return paths


def _group(row: HistoryRow) -> dict[str, str]:
    members = sorted(next(iter(row.calls.values())).members)
    return {"name": str(row.group), "desc": _description(row), "ranks": str(members)}


def _description(row: HistoryRow) -> str:
    return f"nbdist group {row.group}"


def _entry(
    index: int, row: HistoryRow, call: RecordedCall, offset_ns: int
) -> dict[str, Any]:
    inputs, outputs = _sizes(row, call)
    state = "done" if row.is_done else call.state  # the snapshot may be in between
    dtypes = [call.dtype]
    ended_ns = call.ended_ns + offset_ns if call.ended_ns else None
    return {
        "record_id": index,
        "pg_id": row.group,
        "process_group": (str(row.group), _description(row)),
        "collective_seq_id": row.sequence,
        "p2p_seq_id": 0,
        "op_id": row.sequence,
        "profiling_name": f"{BACKEND}:{KNOWN.get(call.operation, 'barrier')}",
        "is_p2p": False,
        "time_created_ns": call.scheduled_ns + offset_ns,
        "time_discovered_started_ns": call.started_ns + offset_ns,
        "time_discovered_completed_ns": ended_ns,
        "duration_ms": (call.ended_ns - call.started_ns) / 1e6 if ended_ns else None,
        "input_sizes": inputs,
        "input_dtypes": dtypes,
        "output_sizes": outputs,
        "output_dtypes": dtypes,
        "state": STATES[state],
        "timeout_ms": 0,
        "retired": call.state in ("done", "failed"),
        "frames": [_frame(call)],
    }


def _sizes(row: HistoryRow, call: RecordedCall) -> tuple[list[Any], list[Any]]:
    """The sizes of the inputs and of the outputs, as torch's functions record them."""
    is_cut = call.shape.endswith("...")
    shape = [] if is_cut else list(ast.literal_eval(call.shape))
    of_all = [len(row.members), *shape]
    if call.operation == "all_gather":
        return [shape], [of_all]
    if call.operation == "reduce_scatter":
        return [of_all], [shape]
    return [shape], [shape]


def _frame(call: RecordedCall) -> dict[str, str | int]:
    name = "unknown" if call.cell is None else f"In[{call.cell}]"
    return {"name": call.description, "filename": name, "line": call.line or 0}
