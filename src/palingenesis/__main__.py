"""``python -m palingenesis`` is ``pgs``."""

from __future__ import annotations

import sys

from palingenesis.cli import main

if __name__ == "__main__":
    sys.exit(main())
