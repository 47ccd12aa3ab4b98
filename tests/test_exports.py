"""The public names exist, with the types that type checkers see."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import nbdist
import nbdist.horovod
import nbdist.keras

PACKAGE = Path(nbdist.__file__).parent
MODULES = [
    ".".join(["nbdist", *path.relative_to(PACKAGE).with_suffix("").parts])
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.stem not in ("__init__", "__main__")
]


FACES = [nbdist, nbdist.horovod, nbdist.keras]
FACE_NAMES = [(face, name) for face in FACES for name in face.__all__]


@pytest.mark.parametrize(
    ("face", "name"), FACE_NAMES, ids=[f"{f.__name__}.{n}" for f, n in FACE_NAMES]
)
def test_every_public_name_is_found_and_stored(face: ModuleType, name: str):
    found = getattr(face, name)
    assert found is not None
    assert name in dir(face)
    assert vars(face)[name] is found


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_an_unknown_name_is_an_attribute_error(face: ModuleType):
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = face.nothing


def imports_for_type_checkers(face: ModuleType) -> dict[str, str]:
    """The module of each name in the TYPE_CHECKING block of a package."""
    tree = ast.parse(Path(str(face.__file__)).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and node.orelse]
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    return {
        alias.name: str(node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_type_checkers_see_the_names_of_a_program(face: ModuleType):
    homes = imports_for_type_checkers(face)
    own = {name for name in face.__all__ if name in OWN_NAMES}
    assert homes.keys() == set(face.__all__) - own
    for name, home in homes.items():
        module = importlib.import_module(home)
        assert getattr(face, name) is getattr(module, name), name


OWN_NAMES = {"__version__", "load_ipython_extension"}
"""Names that nbdist/__init__.py itself defines."""


REVEALED = {
    "nbdist.all_reduce": ["tensor: torch._tensor.Tensor", "algorithm: str ="],
    "nbdist.loader": ["batch_size: int | None =", "loader.Loader"],
    "nbdist.Cluster": ["device: str | None =", "clusters.cluster.Cluster"],
    'nbdist.Cluster(n=2, device="cpu")': ['"nbdist.clusters.cluster.Cluster"'],
    "nbdist.cluster()": ['"nbdist.clusters.cluster.Cluster"'],
    "nbdist.horovod.allreduce": ["prescale_factor: float =", "-> torch._tensor"],
    "nbdist.horovod.DistributedOptimizer": ["[Optimizer <:", "-> Optimizer"],
    "nbdist.keras.size": ["def () -> int"],
    "nbdist.all_redcue": ["error: ", "no attribute", '"all_reduce"'],
    "nbdist.horovod.allredcue": ["error: ", "no attribute", '"allreduce"'],
    "nbdist.keras.siez": ["error: ", "no attribute"],
    'nbdist.Cluster(devcie="cpu")': ["error: ", '"devcie"', '"device"'],
    'nbdist.Cluster(2, threads="many")': ["error: ", '"threads"', "int | None"],
    "nbdist.strategies.ParameterServer": ["n_ps: int =", "max_staleness: int |"],
    "nbdist.strategies.Mirored": ["error: ", "no attribute", '"Mirrored"'],
    "nbdist.elastic.run": ["max_restarts: int =", "timeout_s: float ="],
    "nbdist.horovod.elastic.TorchState": ["optimizer: torch.optim.optimizer"],
    "nbdist.Cluster(2).run(len, [])": ['"list[int]"'],
    "nbdist.Cluster(2).on(1).run(len, [], wait=False)": ["CallFuture[list[int]]"],
}  # fmt: skip
"""Parts of mypy's answer for each expression."""


@pytest.fixture(scope="session")
def revealed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """mypy's answer for each expression in a user's file: its type, or an error."""
    names = {f"{face.__name__}.{name}" for face, name in FACE_NAMES}
    expressions = sorted(names | REVEALED.keys())
    folder = tmp_path_factory.mktemp("user")
    imports = "import nbdist\nimport nbdist.horovod\nimport nbdist.keras\n"
    lines = [f"reveal_type({expression})\n" for expression in expressions]
    (folder / "user.py").write_text(imports + "".join(lines), encoding="utf-8")
    # The repository's cache of mypy, where there is one, saves reading torch again.
    cache = PACKAGE.parent / ".mypy_cache"
    settings = ["--strict", "--cache-dir", str(cache), "--no-error-summary"]
    answer = subprocess.run(
        [sys.executable, "-m", "mypy", *settings, str(folder / "user.py")],
        capture_output=True, text=True, timeout=170, cwd=PACKAGE.parent,
    )  # fmt: skip
    assert answer.stderr == ""
    said: dict[str, str] = {}
    for line in answer.stdout.splitlines():
        _, number, text = line.split(":", 2)
        expression = expressions[int(number) - 4]
        said[expression] = said.get(expression, "") + text.strip()
    assert said.keys() == set(expressions), answer.stdout
    return said


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_mypy_reveals_the_parameters_of_functions(
    face: ModuleType, revealed: dict[str, str]
):
    for name in face.__all__:
        value, text = getattr(face, name), revealed[f"{face.__name__}.{name}"]
        assert text.startswith("note: Revealed type is "), text
        assert text != 'note: Revealed type is "Any"', name
        if inspect.isfunction(value):
            inner = re.sub(r"\[[^\]]*\]", "", text)  # of the types' own commas
            names = re.findall(
                r"[(,] \*{0,2}(\w+)(?=:| =)", inner.replace("(", "( ", 1)
            )
            expected = list(inspect.signature(value).parameters)
            assert [each for each in names if each in expected] == expected, text


@pytest.mark.parametrize("expression", REVEALED)
def test_mypy_reveals_signatures_and_misspelt_names(
    expression: str, revealed: dict[str, str]
):
    parts = REVEALED[expression]
    assert [part for part in parts if part not in revealed[expression]] == []


@pytest.mark.parametrize("module", MODULES)
def test_the_exports_of_every_module_exist(module: str):
    path = PACKAGE.parent / (module.replace(".", "/") + ".py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if [t.id for t in targets if isinstance(t, ast.Name)] == ["__all__"]:
            assert isinstance(node, ast.Assign)
            names = ast.literal_eval(node.value)
            loaded = importlib.import_module(module)
            assert [name for name in names if not hasattr(loaded, name)] == []


ROOT = PACKAGE.parent
USERS = sorted(
    p for name in ("tests", "benchmarks") for p in (ROOT / name).rglob("*.py")
)


@pytest.mark.parametrize("path", USERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_the_tests_import_exists(path: Path):
    """Some of them run only on a machine with a GPU or with another torch."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "nbdist"
        ):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
