"""What other packages need of plots and users do not."""

# ruff: noqa: F401  (imported for those packages)

from qtoolkit.plots._numerics import numerics_map
