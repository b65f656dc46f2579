"""Decoding without a C++ compiler, which `mx.compile` uses on the CPU, also in the models of mlx-lm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
from clotho.process import load_blas
load_blas()
from tests.inference.engine_helpers import GREEDY, submit_request, make_engine, make_prompt, run
engine = make_engine()
answer = submit_request(engine, make_prompt(5), GREEDY)
run(engine)
assert not answer.failures, answer.failures
assert len(answer.completions[0].tokens) == 12
"""


def test_the_engine_decodes_without_a_cpp_compiler(tmp_path: Path) -> None:
    """With an empty PATH and no compiled kernels."""
    environment = {"PATH": "/nonexistent", "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
