"""The server: scrambled ids in, scrambled ids out. It never holds a key, a tokenizer or plain text."""
