"""`python -m qtoolkit`: the command."""

from qtoolkit.cli import main

main()
