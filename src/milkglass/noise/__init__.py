"""Randomness on which a guarantee or a secret rests: one place, one cryptographic source.

    stream.py       ChaCha20 key streams, sub-keys, integers, orders; streams bound to the data that their noise covers
    root.py         the secret of a client half, a stream for each text and each use, and secret matrices
    rounded.py      exact samples of a rounded Gaussian and a rounded Laplacian
    grid.py         the grid that inputs and noise lie on; the additive mechanisms, and what of their noise is public
    clipping.py     bounds in L1 and L2 that hold in floating point as well
    selection.py    report-noisy-max and the exponential mechanism, over integers
    responses.py    randomised response over several values
    operators.py    PyTorch's random operators (dropout), drawn from a stream

No other file of Milkglass may draw what is secret or what a guarantee rests on. tests/noise/test_sources.py searches
the source for generators of PyTorch, NumPy and Python, and lists the allowed ones with reasons.
"""
