"""mlx-lm's models use `mx.compile`, which on the CPU needs a C++ compiler at run time."""

from __future__ import annotations

import mlx.core as mx
import structlog

log = structlog.get_logger(__name__)


def ensure_compile_works() -> bool:
    """Try a small fused kernel; where none can be built, switch `mx.compile` off for the process. Return if it works.

    What is switched off then runs operation by operation, with the same results.
    """

    def probe(x: mx.array) -> mx.array:
        return mx.tanh(x * 0.5 + 0.25) * x

    try:
        mx.eval(mx.compile(probe)(mx.array([1.0, 2.0])))
    except RuntimeError as error:
        mx.disable_compile()
        log.warning("mx.compile is off: no C++ compiler", reason=str(error)[:200])
        return False
    return True
