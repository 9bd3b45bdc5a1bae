"""`python -m writehead` is the command `writehead`."""

from __future__ import annotations

import sys

from writehead.cli import main

sys.exit(main())
