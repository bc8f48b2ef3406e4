# SPDX-License-Identifier: Apache-2.0
"""Print the files of a package folder that are installed as they are, one a line, relative to the current folder."""

import sys
from pathlib import Path

INSTALLED = {".py", ".pyi", ".pxd", ".typed"}


def main(folder: str) -> None:
    root = Path(__file__).resolve().parent.parent
    for path in sorted((root / folder).rglob("*")):
        if path.suffix in INSTALLED and not path.name.startswith("."):
            print(path.relative_to(root).as_posix())


if __name__ == "__main__":
    main(sys.argv[1])
