"""What experiments, documentation and tests use of the command beside its public names."""

# ruff: noqa: F401  (imported for those)

from qtoolkit.cli._app import EXAMPLES, app
from qtoolkit.cli._tables import table
