"""From a user's Python function to an IR graph."""
