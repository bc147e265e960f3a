"""The server: it receives and returns scrambled ids. It never has a key, a tokenizer or plain text."""
