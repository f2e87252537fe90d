"""The original's own model, built without memory for its weights, and the stored tensors of its parameters."""
