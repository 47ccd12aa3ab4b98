"""The counts of benchmarks/frames.py."""

from benchmarks.frames import circles, frames_of, modules
from nbdist.wire import format_ranks


def test_an_import_circle_is_counted_and_others_are_not() -> None:
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == 0
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == 1


def test_the_package_has_no_import_circle() -> None:
    assert modules()["import circles"] == 0


def test_only_functions_of_the_package_are_frames() -> None:
    assert frames_of(lambda: format_ranks([0, 1]))["files"] == 1
    assert frames_of(lambda: sorted([1, 0], key=lambda each: each))["frames"] == 0
