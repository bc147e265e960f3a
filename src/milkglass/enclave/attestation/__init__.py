"""What an enclave proves of itself, and what is given to it on that proof."""
