"""What to do about the error: layers to keep, in the words of quantizing programs, and formats that go together."""
