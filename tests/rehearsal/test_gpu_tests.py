"""The tests of a GPU run on a CPU, so that they fail on a GPU for no other reason."""

import os
import subprocess
import sys

import pytest

from tests.support.runs import ROOT


@pytest.mark.slow
def test_the_tests_of_make_test_gpu_run(tmp_path):
    """Without the compiler's minutes."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "-p", "no:cacheprovider"]
    environ = {**os.environ, "TEST_GPU_ON": "cpu", "TORCHDYNAMO_DISABLE": "1"}
    command += ["--basetemp", str(tmp_path / "runs")]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
