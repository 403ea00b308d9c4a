"""Sequence operations, one folder each: a sequential reference and a chunked form that trains."""
