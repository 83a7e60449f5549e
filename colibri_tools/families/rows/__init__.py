"""The rows of the family table, by maker."""
