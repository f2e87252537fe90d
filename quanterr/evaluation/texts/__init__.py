"""The inputs of language models: texts, conversations and tasks as tokens."""
