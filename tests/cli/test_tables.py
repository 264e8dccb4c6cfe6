"""Progress in a terminal and elsewhere."""

import os
import pty
import re
import sys

from qtoolkit.cli import _tables


def in_terminal(start, command, columns):
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    process = start(command, stdout=theirs, stderr=theirs, stdin=theirs, env=environment)
    os.close(theirs)
    output = b""
    try:
        while part := os.read(ours, 65536):
            output += part
    except OSError:  # how Linux says that the other side is closed
        pass
    finally:
        os.close(ours)
    assert process.wait(timeout=60) == 0, output
    return output.decode()


LONG = "model.layers.{}.self_attn.a_module_with_a_long_name.q_proj.weight"


def test_progress_shows_bytes_rate_and_remaining_time(start):
    """A line that wraps cannot be replaced by the next one: it moves the cursor up, "ESC [1A"."""
    program = (
        "import time\n"
        "from qtoolkit.cli._tables import progress\n"
        "with progress('dequantizing') as callback:\n"
        "    for i in range(1, 8):\n"
        f"        callback({LONG!r}.format(i), i * 10**8, 1234567890)\n"
        "        time.sleep(0.1)\n"
    )
    output = in_terminal(start, [sys.executable, "-c", program], columns=80)
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zK-Z]", "", output))
    assert max(map(len, lines)) == 80
    assert output.count("\x1b[1A") == 1  # the end, which removes the bar
    shown = re.compile(r"━ [\d.]+/1\.2 GB +[\d.]+ [MG]B/s +0:00:\d\d model\.layers\.\d")
    assert any(map(shown.search, lines))


def test_elsewhere_progress_is_a_line_at_every_tenth(capsys):
    with _tables.progress("converting") as callback:
        for name, done in (("a", 1), ("b", 20), ("c", 21), ("d", 61), ("e", 100)):
            callback(name, done * 25 * 10**6, 25 * 10**8)
    assert capsys.readouterr().err.splitlines() == [
        "converting:  20 %, 0.5/2.5 GB  b",
        "converting:  60 %, 1.5/2.5 GB  d",
        "converting: 100 %, 2.5/2.5 GB  e",
    ]
