"""The committed bundle is up to date and needs no other file."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FRONTEND = ROOT / "frontend"
STATIC = ROOT / "nbdist" / "widgets" / "static"

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
needs_modules = pytest.mark.skipif(
    not (FRONTEND / "node_modules").is_dir(), reason="needs npm ci in frontend/"
)


def node(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["node", *arguments], cwd=FRONTEND, capture_output=True, text=True, timeout=60
    )


@needs_node
def test_the_javascript_tests_pass() -> None:
    files = [str(file) for file in sorted((FRONTEND / "test").glob("*.test.js"))]
    done = node("--test", *files)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_node
@needs_modules
def test_the_bundle_is_built_from_the_sources(tmp_path: Path) -> None:
    done = node("build.mjs", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for built in sorted(tmp_path.iterdir()):
        committed = (STATIC / built.name).read_text(encoding="utf-8")
        assert built.read_text(encoding="utf-8") == committed, (
            f"{built.name} is stale: run npm run build in frontend/"
        )


def test_the_bundle_needs_no_network_and_keeps_its_licence() -> None:
    script = (STATIC / "monitor.js").read_text(encoding="utf-8")
    style = (STATIC / "monitor.css").read_text(encoding="utf-8")
    assert "MIT licence" in script[:400]
    assert "Leon Sorokin" in script[:400]
    assert "Permission is hereby granted" in (STATIC / "uPlot.LICENSE").read_text()
    assert not re.search(r"\b(import|fetch|XMLHttpRequest|WebSocket)\s*\(", script)
    assert not re.search(r"@import|url\(", style)
    assert len(script) < 95_000
