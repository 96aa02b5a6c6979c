"""What all tests share."""

import pytest
import torch
from hypothesis import settings

# A busy machine is no failure, so examples have no deadline.
settings.register_profile("specdec", deadline=None)
settings.load_profile("specdec")


@pytest.fixture(scope="module")
def one_thread():
    """Tiny models are slower on two threads than on one. For a whole file: `pytestmark = usefixtures(...)`."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
