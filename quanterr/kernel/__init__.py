"""The computations on every element: sums of two weights, values of codes, codes of numbers.

Each has a specification in torch, and is carried out by torch or by the compiled kernel: c/kernel.h declares its
functions, structs.py reads them from there, and build.py compiles c/ when quanterr is installed, if there is a C
compiler.
"""
