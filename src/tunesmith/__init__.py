"""Tunesmith fine-tunes language models on the hardware you have, and proves the result."""

__version__ = "0.1.0"
