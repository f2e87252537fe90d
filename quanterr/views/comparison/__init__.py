"""The view of a report: its sections, the data of its page, its figure and its rows."""
