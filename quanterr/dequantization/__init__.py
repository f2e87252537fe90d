"""Dequantization: a checkpoint in any format that quanterr reads is written back as plain floats.

tensors.py    the tensors to write: name, dtype and shape, and the weight or entry that each comes from
layout.py     the files, the bytes of each tensor in them, and the other files of a model's folder
run.py        the run, which decodes, writes, verifies, and continues an interrupted one
"""
