"""Puts a file in place of a marked block of a page, so that nobody types the figures in it.

Command: python experiments/update_page.py demo qtoolkit-demo/table.md
Claim: everything but what stands between `<!-- demo ... -->` and `<!-- /demo -->` stays as it was.
"""

import argparse
import re
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs/pages/howto/real-model.md"


def with_block(text: str, name: str, block: str) -> str:
    """`text` with `block` between the markers of `name`, on lines of its own.

    Raises:
      ValueError: There is not exactly one such pair of markers.
    """
    quoted = re.escape(name)
    markers = re.compile(rf"(<!-- {quoted}[: ][^>]*-->\n).*?(<!-- /{quoted} -->)", re.DOTALL)
    filled, count = markers.subn(lambda found: f"{found[1]}\n{block.strip()}\n\n{found[2]}", text)
    if count != 1:
        raise ValueError(
            f"{count} blocks from <!-- {name} --> to <!-- /{name} -->, expected one; "
            "put the two lines where the block belongs"
        )
    return filled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the block: demo or real-model")
    parser.add_argument("file", type=Path, help="what goes into it: qtoolkit-demo/table.md")
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    try:
        block = arguments.file.read_text(encoding="utf-8")
        text = arguments.page.read_text(encoding="utf-8")
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}; `make run` writes qtoolkit-demo/table.md")
    try:
        filled = with_block(text, arguments.name, block)
    except ValueError as error:
        sys.exit(f"{arguments.page}: {error}")
    arguments.page.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main()
