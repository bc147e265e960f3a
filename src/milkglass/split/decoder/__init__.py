"""A decoder cut behind its embedding layer (CMIF, section 3.1): vectors of tokens cross, ids of the answer come back.

The client holds the embedding layer, in an enclave (`milkglass.enclave`); the server holds every other layer with the
key-value cache. What crosses is the prompt's vectors once, then one vector for each token of the answer.
"""
