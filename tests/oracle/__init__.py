"""Committed oracle values, the script that made them, and live comparisons with transformers."""
