"""Functions of Open MPI are replaced in the versions that are known, and in no other.

A small library with Open MPI's names stands for Open MPI.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nbdist.collectives.before_mpi import unknown_version

MPI = r"""
#include <stdbool.h>
#include <string.h>
int revoked;
int MPI_Get_library_version(char *text, int *length) {
    strcpy(text, "VERSION, package: none"); *length = strlen(text); return 0;
}
bool ompi_comm_revoke_local(void *comm, bool only) { revoked++; return true; }
int mca_coll_base_comm_select(void *comm) { return 0; }
int ompi_comm_activate_nb(void **a, void *b, void *c, const void *d, const void *e,
                          bool f, int g, void **h) { return 0; }
int ompi_comm_nextcid_nb(void *a, void *b, void *c, const void *d, const void *e,
                         bool f, int g, void **h) { return 0; }
"""
WORK = """
import ctypes, sys
before = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
mpi = ctypes.CDLL("libmpi.so.40", ctypes.RTLD_GLOBAL)
before.mca_coll_base_comm_select(8)  # MPI_Init completes a communicator
before.ompi_comm_nextcid_nb(16, 0, 0, 0, 0, False, 0, 0)
before.ompi_comm_revoke_local(16, True)
print(ctypes.c_int.in_dll(mpi, "revoked").value)
before.mca_coll_base_comm_select(16)
print(ctypes.c_int.in_dll(mpi, "revoked").value)
"""


@pytest.mark.parametrize(
    ("version", "revoked"),
    [("Open MPI v5.0.11", ["0", "1"]), ("Open MPI v5.1.0", ["1", "1"])],
    ids=["known", "unknown"],
)
def test_a_revocation_waits_in_a_known_version_only(
    version: str, revoked: list[str], tmp_path: Path
) -> None:
    found = importlib.util.find_spec("nbdist.collectives._late_revocation")
    compiler = shutil.which("cc")
    if found is None or found.origin is None or compiler is None:
        pytest.skip("needs the compiled module and a compiler")
    source, library = tmp_path / "mpi.c", tmp_path / "libmpi.so.40"
    source.write_text(MPI.replace("VERSION", version))
    name = "-Wl,-soname,libmpi.so.40"
    subprocess.run(
        [compiler, "-shared", "-fPIC", name, "-o", library, source], check=True
    )
    done = subprocess.run(
        [sys.executable, "-c", WORK, found.origin],
        env={"LD_LIBRARY_PATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.split() == revoked


def test_another_version_is_named_to_the_user() -> None:
    assert unknown_version("Open MPI v5.0.11, package: Open MPI") == ""
    assert unknown_version("MPICH Version: 4.2") == ""
    assert "Open MPI v6.0.0 is no version that nbdist knows" in unknown_version(
        "Open MPI v6.0.0, package: Open MPI"
    )
