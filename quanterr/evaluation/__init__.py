"""Evaluation of quantized models: all sides run together through the original's own architecture, block by block.

run.py opens the candidates (opening.py), prepares the model and the texts (preparation.py), runs them together with the
original (beside_original.py) or a reference (beside_reference.py) and assembles the document (assembly.py).

models/       the model of a config.json without memory for weights, and the stored tensors that make up a parameter
texts/        texts, conversations and tasks as tokens
denoisers/    recorded and made-up calls, rollouts, and the config that belongs to a single file
running/      the run of all sides, unit by unit, which rounds inputs, keys and values as a runtime does
measures/     perplexity, divergence, agreement; errors of hidden states and of the outputs of weights
files/        what is written besides the document: sensitivity, importance, saliency, references
images.py     the comparison of two folders of decoded images
"""
