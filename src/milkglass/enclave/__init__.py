"""A trusted execution environment on the client (CMIF, section 3.1).

It contains the tokenizer, the embedding table and the sanitizer. The provider hides its table from the client, and the
client its text from the provider: plain text goes in, vectors of sanitized tokens come out. `handler.py` runs in the
enclave; `enclave.py` talks to it through a pipe, its only channel. Of the kinds of enclaves, `gramine-sgx` is attested;
`process` and `gramine-direct` are not.
"""
