"""The command `qtoolkit`, in this process."""

from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from qtoolkit.cli.internal import app


def run(*arguments: Any, **options: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


def fails(*arguments: Any, code: int = 1) -> str:
    """The one line that a failing command prints; nothing else, no traceback."""
    result = run(*arguments)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("converting")]
    assert (result.exit_code, result.stdout, len(lines)) == (code, "", 1), result.output
    assert isinstance(result.exception, SystemExit)
    assert lines[0].startswith("qtoolkit: ")
    return lines[0].removeprefix("qtoolkit: ")
