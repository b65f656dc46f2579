"""What the actors are built from, one subject per package.

Importing the package loads an optimised BLAS, which must happen before the process's first `import mlx.core`.
"""

from clotho.cpu import load_blas

BLAS = load_blas()
