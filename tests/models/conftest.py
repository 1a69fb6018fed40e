import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
