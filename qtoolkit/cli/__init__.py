"""The command `qtoolkit`. JAX loads with the commands that compute, not with those that look."""

from qtoolkit.cli._app import main

__all__ = ["main"]
