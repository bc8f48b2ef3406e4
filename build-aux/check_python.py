# SPDX-License-Identifier: Apache-2.0
"""Exit with a message unless this Python can build the package in a virtual environment; runs on any Python 3."""

import os
import sys
import sysconfig

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"cudecomp needs Python 3.11 or later, this is {sys.version.split()[0]}; use make PYTHON=...")
if not os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")):
    sys.exit("This Python has no headers (Python.h); on Debian and Ubuntu: apt-get install python3-dev")
try:
    import ensurepip  # noqa: F401
except ImportError:
    sys.exit("This Python has no venv with pip; on Debian and Ubuntu: apt-get install python3-venv")
