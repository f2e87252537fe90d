"""The inputs of a language model: texts, conversations and tasks as tokens."""
