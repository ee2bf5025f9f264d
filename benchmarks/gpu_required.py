"""Ends a benchmark of the GPU with one line where there is nothing to measure: import it before all that needs Triton.

Devices are counted by the driver's management library, so nothing that is forked later finds CUDA in use.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

import torch

if find_spec("triton") is None:
    sys.exit(f"{sys.argv[0]} needs Triton: pip install 'longturn[gpu]'")
if torch.cuda.device_count() == 0:
    sys.exit(f"{sys.argv[0]} needs an NVIDIA GPU, and torch sees none")
