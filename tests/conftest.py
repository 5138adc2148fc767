"""Makes `tests.fakes` importable from every test file, keeps torch to one thread (the tensors here are tiny), and lends
a home folder, in which profiles of machines are kept."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "home", lambda: tmp_path_factory.getbasetemp())
        yield
