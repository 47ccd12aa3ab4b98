"""The logged values as a table: a pandas DataFrame, or a file of CSV or Parquet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from nbdist.errors import UsageError
from nbdist.ipc.atomic_files import write_atomically
from nbdist.widgets.source import Snapshot, Source

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["COLUMNS", "data_frame", "rows", "save"]

COLUMNS = ("metric", "rank", "step", "time", "value", "low", "high")
"""`time` is in seconds since the epoch. `value` is the mean of a bucket's values, `low`
and `high` are the least and the greatest. `step` is the first step of the bucket."""

Row = tuple[str, int, int, float, float, float, float]


def rows(snapshot: Snapshot, metrics: Sequence[str] = ()) -> Iterator[Row]:
    """The rows of the table, by metric, rank and step.

    Args:
        snapshot: All data of a source.
        metrics: The metrics to include; empty for all.

    Raises:
        UsageError: No rank has logged one of these metrics.
    """
    deltas = snapshot.deltas
    names = list(dict.fromkeys(delta.metric for delta in deltas))
    for metric in metrics:
        if metric not in names:
            known = ", ".join(names) or "-"
            raise UsageError(f"no rank has logged {metric!r}: the metrics are {known}")
    for delta in sorted(deltas, key=lambda each: (names.index(each.metric), each.rank)):
        if not metrics or delta.metric in metrics:
            columns = delta.times, delta.means, delta.lows, delta.highs
            for step, *values in zip(delta.steps, *columns, strict=True):
                time, value, low, high = values
                yield delta.metric, delta.rank, int(step), time, value, low, high


def data_frame(source: Source, metrics: Sequence[str] = ()) -> pd.DataFrame:
    """The table as a pandas DataFrame with `COLUMNS`.

    Raises:
        UsageError: No rank has logged one of these metrics, or pandas is not installed.
    """
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise UsageError(
            "a DataFrame needs pandas, which is not installed: pip install pandas. "
            "%dist_monitor --save FILE.csv works without it"
        ) from error
    return pd.DataFrame.from_records(
        list(rows(source.snapshot(), metrics)), columns=list(COLUMNS)
    )


def save(source: Source, path: Path, metrics: Sequence[str] = ()) -> int:
    """Write the table to a file, which is complete or left as it was.

    Args:
        source: The data, such as a `Collector`.
        path: The file, which ends in `.csv` or `.parquet`.
        metrics: The metrics to include; empty for all.

    Returns:
        The number of rows.

    Raises:
        UsageError: The suffix is another, the folder does not exist, or pandas or
            pyarrow is not installed.
        OSError: The file could not be written.
    """
    if path.suffix not in (".csv", ".parquet"):
        raise UsageError(f"--save {path}: expected a .csv or .parquet file")
    if not path.parent.is_dir():
        raise UsageError(f"--save {path}: the folder {path.parent} does not exist")
    if path.suffix == ".parquet":
        return _save_parquet(data_frame(source, metrics), path)
    found = list(rows(source.snapshot(), metrics))

    def write(file: BinaryIO) -> None:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(text)
        writer.writerow(COLUMNS)
        writer.writerows(found)
        text.detach()  # flushes; the file stays open

    write_atomically(path, write)
    return len(found)


def _save_parquet(table: pd.DataFrame, path: Path) -> int:
    try:
        write_atomically(path, lambda file: table.to_parquet(file, index=False))
    except ImportError as error:
        raise UsageError(
            f"--save {path}: Parquet needs pyarrow, which is not installed: "
            "pip install pyarrow, or save a .csv"
        ) from error
    return len(table)
