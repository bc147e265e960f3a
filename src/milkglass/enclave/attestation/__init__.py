"""Proves to a provider what an enclave runs, and releases data to it on that proof."""
