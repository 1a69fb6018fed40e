import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """The machine is shared: more intra-op threads than free cores is many times slower."""
    torch.set_num_threads(1)
