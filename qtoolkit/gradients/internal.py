"""What the packages above need of gradients and users do not."""

# ruff: noqa: F401  (imported for those packages)

from qtoolkit.gradients._learned import LEAST
