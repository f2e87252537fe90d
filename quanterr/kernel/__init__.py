"""The computations on every element: sums of two weights, values of codes, codes of numbers.

Each has a specification in torch, and is computed by torch or by the compiled kernel. c/kernel.h declares the kernel's
functions, structs.py reads these declarations, and build.py compiles c/ when quanterr is installed, if there is a C
compiler.
"""
