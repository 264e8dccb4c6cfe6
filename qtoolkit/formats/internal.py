"""What the packages above need of formats and users do not."""

from qtoolkit.formats._granularity import scaled_by

__all__ = ["scaled_by"]
