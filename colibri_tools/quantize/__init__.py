"""Choosing and making block types: rules, mixes, encoding."""
