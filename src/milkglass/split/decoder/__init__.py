"""A decoder cut behind its embedding layer (CMIF, section 3.1).

Vectors of tokens are sent, and ids of the answer come back. The client has the embedding layer, in an enclave
(`milkglass.enclave`). The server has all other layers and the key-value cache. The client sends the prompt's vectors
once, then one vector for each token of the answer.
"""
