# SPDX-License-Identifier: Apache-2.0
"""Runs the command line as `python -m cudecomp`."""

import sys

from .cli import main

sys.exit(main())
