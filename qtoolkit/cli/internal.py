"""What experiments use of the command beside its public names."""

# ruff: noqa: F401  (imported for experiments)

from qtoolkit.cli._tables import table
