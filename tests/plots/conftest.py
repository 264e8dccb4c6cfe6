"""Pictures are made without pyplot, whose figures are a global state of the user's own."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _no_pyplot(monkeypatch):
    """An import of it fails, whatever other tests of this process have loaded."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
