"""Executors: the loop that follows a schedule, and what carries its messages between processes."""
