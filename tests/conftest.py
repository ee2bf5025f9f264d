"""Settings that must precede every import of a test session."""

from __future__ import annotations

import os
from pathlib import Path

# Triton reads this when it and each kernel are imported, and whichever test imports it first decides for all. Without a
# card its kernels can only be interpreted; with one, the files that want the interpreter say so, and run alone.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
