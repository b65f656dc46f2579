"""The boxes: one module per actor, in flow order.

Importing anything of it loads an optimised BLAS first, which must happen before the process's first `import mlx.core`.
"""

from actors.compute.blas import load_blas

BLAS = load_blas()
