"""The contenders: one program per contender and kind of work, each run as a separate process.

A contender runs in the environment where it is installed: Clotho in this one, the others in the environment of
`bench/contenders/requirements.txt`. All of them load the same BLAS in the same way, because `import bench` does that
first. Only `process` imports packages that one of the two environments lacks.
"""
