"""The command `qtoolkit`, also `python -m qtoolkit`: interrupted in one line from the start."""

import os
import sys


def main() -> None:
    """Runs the command; exits with 0, with 1 after a failure, with 2 after misuse."""
    try:
        # Within the `try`, for loading it takes a few tenths of a second.
        from qtoolkit.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("qtoolkit: interrupted; nothing was written\n")
        sys.stderr.flush()
        os._exit(130)  # what was interrupted while it was imported must not run its exit handlers


if __name__ == "__main__":
    main()
