"""Writing a checkpoint back as plain floats, in any of the formats that quanterr reads.

tensors.py    what is written: each tensor's name, dtype and shape, and the weight or entry that it comes from
layout.py     in which files, at which bytes, and the other files of a model's folder
run.py        decodes and writes, resumes, proves what it wrote
"""
