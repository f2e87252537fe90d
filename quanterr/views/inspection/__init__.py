"""The view of an inspection."""
