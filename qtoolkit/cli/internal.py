"""What experiments use of the command beside its public names."""

from qtoolkit.cli._tables import table

__all__ = ["table"]
