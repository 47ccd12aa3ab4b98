"""The folder layout is the architecture: imports run one way only."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "nbdist"
SHARED = {"config", "errors", "lazy", "wire"}
LAYERS = [
    "magics", "session", "cluster", "engine", "keras", "horovod", "elastic",
    "strategies", "training", "collectives", "telemetry", "ipc", "widgets",
]  # fmt: skip
NOTEBOOK_SIDE = {"magics", "session", "cluster", "widgets"}
RANK_ONLY = {"mpi4py", "torch"}
FILES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    """The layer or shared file a source file belongs to; "" for the face."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imported_modules(path: Path) -> list[str]:
    """Dotted names that a file imports, anywhere in it, TYPE_CHECKING included."""
    names = []
    package = ["nbdist", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            names.append(prefix)
            names += [f"{prefix}.{alias.name}" for alias in node.names]
    return names


def imported_rooms(path: Path) -> set[str]:
    rooms = {n.split(".")[1] for n in imported_modules(path) if n.startswith("nbdist.")}
    return rooms & (SHARED | set(LAYERS))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    own = room(path)
    if own == "":
        return  # the face names every room, lazily
    assert own in SHARED or own in LAYERS, f"{own} is not a room of the design"
    for other in imported_rooms(path) - {own} - SHARED:
        assert own not in SHARED, f"shared file {own} imports {other}"
        assert LAYERS.index(other) > LAYERS.index(own), f"{own} imports {other}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_notebook_side_never_imports_torch_or_mpi(path: Path) -> None:
    if room(path) in NOTEBOOK_SIDE | SHARED:
        tops = {name.split(".")[0] for name in imported_modules(path)}
        assert not tops & RANK_ONLY


def test_only_cluster_imports_the_client_side_of_ipyparallel() -> None:
    for path in FILES:
        if room(path) not in {"cluster", "engine"}:
            modules = imported_modules(path)
            assert not [m for m in modules if m.split(".")[0] == "ipyparallel"], path
