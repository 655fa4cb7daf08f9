"""Tensors in, numbers out. Knows torch; knows nothing of alarms or files."""
