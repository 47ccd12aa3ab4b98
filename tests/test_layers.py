"""Each package is a layer: it imports only layers below it.

The checks read the imports in the source text. They include imports inside functions,
and the imports of the imported modules. Imports under `TYPE_CHECKING` do not run. Only
the check of the layers includes them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "nbdist"
SHARED = {"config", "errors", "kernel_versions", "lazy", "wire"}
LAYERS = [
    "commands", "keras", "horovod", "torchft", "magics", "session", "mcp", "clusters",
    "engine", "elastic", "strategies", "training", "collectives", "telemetry",
    "widgets", "ipc",
]  # fmt: skip
NOTEBOOK_SIDE = {"", "commands", "magics", "session", "clusters", "widgets"} | SHARED
RANK_SIDE = {"torch", "mpi4py", "nbdist.engine", "nbdist.collectives"}
ON_DEMAND = {
    # They unpickle a tensor that the user pulls.
    ("nbdist.ipc.serialization", "torch"),
    ("nbdist.ipc.memory_regions", "torch"),
}
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    """The dotted name of a source file."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def layer(module: str) -> str:
    """The layer or shared file that a module belongs to; "" for nbdist itself."""
    return module.partition(".")[2].partition(".")[0]


def nodes(tree: ast.AST, *, type_checking: bool) -> Iterator[ast.AST]:
    """All nodes below a node, with or without those under `TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if (
            not type_checking
            and isinstance(node, ast.If)
            and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            for branch in node.orelse:
                yield branch
                yield from nodes(branch, type_checking=type_checking)
        else:
            yield from nodes(node, type_checking=type_checking)


@cache
def imports(module: str, *, type_checking: bool = False) -> frozenset[str]:
    """The modules that a module imports, with their full names."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in nodes(tree, type_checking=type_checking):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: 1 - node.level or None])
            prefix = ".".join(filter(None, [base if node.level else "", node.module]))
            full = {f"{prefix}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else prefix for name in full}
    return frozenset(names)


def loaded_with(module: str) -> Iterator[str]:
    """The modules that an import of this one runs: its packages, and itself."""
    parts = module.split(".")
    yield from (".".join(parts[: n + 1]) for n in range(len(parts)))


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module: str) -> None:
    own = layer(module)
    if own in ("", "__main__"):
        return  # `nbdist` names every layer, and loads it at first use
    assert own in SHARED or own in LAYERS, f"{own} is not in LAYERS"
    named = imports(module, type_checking=True)
    layers = {layer(name) for name in named if name.startswith("nbdist.")}
    for other in layers - {own} - SHARED:
        assert own not in SHARED, f"shared file {own} imports {other}"
        assert LAYERS.index(other) > LAYERS.index(own), f"{own} imports {other}"


def test_the_notebook_side_imports_neither_torch_nor_mpi() -> None:
    chains = {name: [name] for name in MODULES if layer(name) in NOTEBOOK_SIDE}
    waiting = list(chains)
    used = set()
    while waiting:
        module = waiting.pop()
        for name in imports(module):
            top = ".".join(name.split(".")[: 2 if name.startswith("nbdist.") else 1])
            if (module, top) in ON_DEMAND:
                used.add((module, top))
                continue
            assert top not in RANK_SIDE, " imports ".join([*chains[module], name])
            for loaded in loaded_with(name):
                if loaded in MODULES and loaded not in chains:
                    chains[loaded] = [*chains[module], loaded]
                    waiting.append(loaded)
    assert used == ON_DEMAND


def test_imports_make_no_circle() -> None:
    graph = {module: imports(module) & set(MODULES) for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("module", MODULES)
def test_underscore_modules_are_imported_in_their_own_package_only(module: str) -> None:
    for name in imports(module, type_checking=True):
        package, underscore, _ = name.partition("._")
        if underscore and name in MODULES:
            assert f"{module}.".startswith(f"{package}."), f"imports {name}"


def test_only_clusters_imports_the_client_side_of_ipyparallel() -> None:
    for module in MODULES:
        if layer(module) not in {"clusters", "engine"}:
            named = imports(module, type_checking=True)
            tops = {name.partition(".")[0] for name in named}
            assert "ipyparallel" not in tops, module
