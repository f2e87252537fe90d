"""Measurements of an evaluation on hidden states, outputs and logits."""
