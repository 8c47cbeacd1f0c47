"""The bench of the driver runs it as it is."""

import re

import pytest

from support.program import ran


@pytest.mark.slow
def test_the_driver_s_costs_are_measured(warm_python):
    done = ran(warm_python, "bench/controller.py", "8", "100")
    assert done.returncode == 0, done.stderr
    found = re.search(r"driver s a step +(\d+\.\d+)", done.stdout)
    assert found and float(found[1]) > 0, done.stdout
