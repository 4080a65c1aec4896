"""One thread a process: the suite runs in as many processes as there are cores (pytest-xdist), which serves small models better."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch

torch.set_num_threads(1)
