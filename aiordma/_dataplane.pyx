# cython: language_level=3
"""The hot path: post, poll, resolve."""
