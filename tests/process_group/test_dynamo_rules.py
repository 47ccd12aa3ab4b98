"""The rule by which torch.compile leaves out nbdist's own code."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import nbdist
from nbdist.collectives.torch_backend.dynamo import skip_in_dynamo

RULES = "torch._dynamo.trace_rules"


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for Dynamo's rules, of a release that has no `add`."""
    rules = ModuleType(RULES)
    rules.__dict__["SKIP_DIRS"] = []
    monkeypatch.setitem(sys.modules, RULES, rules)
    return rules


def test_the_package_is_added_once(rules: ModuleType) -> None:
    skipped = rules.__dict__["SKIP_DIRS"]
    rules.__dict__["add"] = lambda name: skipped.append(nbdist.__path__[0])
    skip_in_dynamo()
    skip_in_dynamo()
    assert skipped == [nbdist.__path__[0]]


def test_other_rules_of_a_release_are_a_warning(rules: ModuleType) -> None:
    with pytest.warns(UserWarning, match="takes no package to skip .*'add'"):
        skip_in_dynamo()
