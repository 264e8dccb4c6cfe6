"""The command `qtoolkit`. Only subcommands that compute import JAX."""

from qtoolkit.cli._app import main

__all__ = ["main"]
