"""Every endpoint is a function of `nbdist.engine`."""

import pytest

from nbdist.engine.rpc_server import function_of
from nbdist.ipc import endpoints


@pytest.mark.parametrize("name", endpoints.__all__)
def test_an_endpoint_names_a_function_of_the_engine(name: str) -> None:
    assert callable(function_of(getattr(endpoints, name)))
