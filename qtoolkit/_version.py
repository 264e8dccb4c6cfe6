"""The version, in one place; read by the build and by `qtoolkit.__version__`."""

__version__ = "0.1.0"
