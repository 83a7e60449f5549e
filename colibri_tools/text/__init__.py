"""Text to token ids and back: tokenizers of every source form, chat templates, tables for C."""
