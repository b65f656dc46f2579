"""Who is measured: one program per contender and kind of work, each driven as a process of its own.

A contender runs in the environment it is installed in: ours in this one, the others in that of
`bench/contenders/requirements.txt`. All load the same BLAS in the same way, for `import bench` does that first. Nothing
here but `process` may import what only one of the two environments has.
"""
