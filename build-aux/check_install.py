# SPDX-License-Identifier: Apache-2.0
"""Check that an installed package is whole: kernel libraries, compiled modules, and what downstream code needs.

Run it outside the source folder; with the argument `cuda`, the CUDA parts must be there as well.
"""

import importlib
import sys
from pathlib import Path

import cudecomp
from cudecomp import _build

FILES = ["__init__.pxd", "plan.pxd", "plan.pyi", "py.typed", "libcudecomp_host.so"]


def main(with_cuda: bool) -> None:
    folder = Path(cudecomp.__file__).parent
    files = [*FILES, "libcudecomp_cuda.so"] if with_cuda else FILES
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        sys.exit(f"{folder} lacks {', '.join(missing)}")
    if with_cuda and not _build.CUDA:
        sys.exit(f"{folder} was built without CUDA")
    for path in sorted(folder.rglob("*.so")):
        module = path.name.partition(".")[0]
        if not module.startswith("lib"):
            importlib.import_module(".".join(["cudecomp", *path.parent.relative_to(folder).parts, module]))
    print(f"cudecomp {cudecomp.__version__} in {folder} is whole; CUDA: {_build.CUDA_VERSION or 'no'}")


if __name__ == "__main__":
    main(sys.argv[1:] == ["cuda"])
