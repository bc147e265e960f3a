"""A trusted execution environment on the client (CMIF, section 3.1): tokenizer, embedding table and sanitizer inside.

The provider keeps its table from the client, the client its text from the provider: plain text goes in, vectors of
sanitized tokens come out. `inside.py` is what runs in it; `enclave.py` speaks with it through a pipe, its only door.
Three kinds are offered: `process` and `gramine-direct`, which are NOT ATTESTED, and `gramine-sgx`.
"""
