"""What all tests share."""

import os

import pytest
import torch
from hypothesis import settings

import tests.interpreted  # noqa: F401  (before anything imports Triton)

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


def pytest_sessionfinish(session, exitstatus):
    """In CI a skipped test is a failure: a backend or kernel that is not tested there is tested nowhere."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if os.environ.get("CI") and skipped and exitstatus == 0:
        names = ", ".join(sorted({report.nodeid for report in skipped}))
        reporter.write_line(f"skipped in CI, which counts as a failure: {names}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
