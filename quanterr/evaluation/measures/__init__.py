"""What an evaluation measures on hidden states, outputs and logits."""
