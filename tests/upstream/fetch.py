"""Brings PyTorch's and Horovod's own test files into a cache folder.

    python tests/upstream/fetch.py [pytorch|horovod] [--horovod-origin URL]

The files are not part of this repository. PyTorch's come from Debian's source package,
through the mirror that this machine's apt uses, and Horovod's from its git repository.
Both are pinned by a checksum. Tests of a suite that is not in the cache are skipped.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["CACHE", "folder_of", "why_missing"]

CACHE = Path(
    os.environ.get("NBDIST_UPSTREAM_CACHE", Path.home() / ".cache" / "nbdist-tests")
)
DEBIAN_SUITE = "trixie"
PYTORCH_PACKAGE = "pytorch=2.6.0+dfsg-7"
PYTORCH_ARCHIVE = "pytorch_2.6.0+dfsg.orig.tar.xz"
PYTORCH_SHA256 = "099a9601bc40d67656e75735c44abedb0fbe92d08817852ab7472eebb7e6ddff"
PYTORCH_FILES = ("test/distributed/", "test/inductor/test_aot_inductor_utils.py")
HOROVOD_ORIGIN = "https://github.com/horovod/horovod.git"
HOROVOD_COMMIT = "2626dc87a3a8eb8fb7d2216198ce45bce0f9e65a"
TIMEOUT_S = 300
_FOLDERS = {
    "pytorch": CACHE / "pytorch-2.6.0" / "test" / "distributed",
    "horovod": CACHE / f"horovod-{HOROVOD_COMMIT[:12]}" / "test",
}


def folder_of(suite: str) -> Path:
    """The folder of the test files of "pytorch" or "horovod"."""
    return _FOLDERS[suite]


def why_missing(suite: str) -> str | None:
    """The reason for which a suite cannot run; None if its files are there."""
    if folder_of(suite).is_dir():
        return None
    return (
        f"{suite}'s test files are not in {CACHE}: run "
        f"`python tests/upstream/fetch.py {suite}`, which downloads them"
    )


def fetch_pytorch(folder: Path) -> None:
    """Download Debian's source package, and unpack its distributed tests."""
    _apt(folder, "update", "-qq")
    _apt(folder, "source", "-qq", "--download-only", "--tar-only", PYTORCH_PACKAGE)
    archive = folder / PYTORCH_ARCHIVE
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != PYTORCH_SHA256:
        raise SystemExit(f"{archive.name} has sha256 {found}, not {PYTORCH_SHA256}")
    with tarfile.open(archive) as tar:
        for member in tar:
            path = member.name.partition("/")[2]
            if path.startswith(PYTORCH_FILES):
                member.name = path
                tar.extract(member, folder, **_extraction())
    _move(folder / "test", folder_of("pytorch").parent)


def _apt(folder: Path, *arguments: str) -> None:
    """Run apt-get with its own state, so that the machine's is not changed."""
    sources = folder / "sources.list"
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    line = f"deb-src [signed-by={keyring}] {_mirror()} {DEBIAN_SUITE} main\n"
    sources.write_text(line)
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    _run(
        ["apt-get", *_options(folder, sources), *arguments],
        folder,
        "apt-get cannot bring Debian's source package",
    )


def _options(folder: Path, sources: Path) -> list[str]:
    options = {
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "",
    }
    return [f"-o{name}={value}" for name, value in options.items()]


def _mirror() -> str:
    """The address of the Debian mirror that this machine uses."""
    if shutil.which("apt-get") is None:
        raise SystemExit("PyTorch's test files come from Debian: there is no apt-get")
    targets = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(ORIGIN) $(LABEL) $(REPO_URI)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    ).stdout
    for line in targets.splitlines():
        if line.startswith("Debian Debian "):
            return line.split()[2]
    raise SystemExit(
        "PyTorch's test files come from Debian, and this machine's apt has no Debian "
        "mirror: run `apt-get update` first"
    )


def _extraction() -> dict[str, str]:
    return {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def fetch_horovod(folder: Path, origin: str) -> None:
    """Fetch one commit, and take its test folder."""

    def git(*arguments: str) -> None:
        _run(["git", *arguments], folder, f"git cannot bring {origin}")

    git("init", "--quiet")
    git("fetch", "--quiet", "--depth=1", origin, HOROVOD_COMMIT)
    git("checkout", "--quiet", HOROVOD_COMMIT, "--", "test")
    _move(folder / "test", folder_of("horovod"))


def _run(command: list[str], folder: Path, cannot: str) -> None:
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        subprocess.run(
            command, cwd=folder, env=environment, check=True, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SystemExit(f"{cannot}: {error}") from error


def _move(source: Path, target: Path) -> None:
    """Put a complete folder into the cache at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.move(source, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", default=[], metavar="pytorch|horovod")
    parser.add_argument("--horovod-origin", default=HOROVOD_ORIGIN)
    options = parser.parse_args()
    fetches: dict[str, Callable[[Path], None]] = {
        "pytorch": fetch_pytorch,
        "horovod": lambda folder: fetch_horovod(folder, options.horovod_origin),
    }
    failed = False
    for suite in options.suites or fetches:
        if why_missing(suite) is not None:
            CACHE.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                try:
                    fetches[suite](Path(folder))
                except SystemExit as error:
                    print(f"{suite}: {error}", file=sys.stderr)
                    failed = True
        print(f"{suite}: {why_missing(suite) or folder_of(suite)}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
