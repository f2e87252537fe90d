"""The original's own model without memory for its weights, and the stored tensors of its parameters."""
