"""Defences as two halves, by name: obfuscated tables, sanitized text, and the halves that send token ids."""
