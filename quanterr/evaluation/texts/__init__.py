"""What a language model reads: texts, conversations and tasks as tokens."""
