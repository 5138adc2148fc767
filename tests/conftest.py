"""Makes `tests.fakes` importable from every test file, and keeps torch to one thread: the tensors here are tiny."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
torch.set_num_threads(1)
