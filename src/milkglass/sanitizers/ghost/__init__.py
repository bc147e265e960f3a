"""GHOST (ASIA CCS '26): replaces tokens by shadows, far in meaning and near in the model's hidden states.

    ghost = Ghost.open(folder)                      # a model that both sides know
    shadow = ghost.sanitize(["a private text"])[0]  # ids to train on, and how they read

search.py finds each token's shadows; states.py runs the model; selection.py chooses; ghost.py combines both; files.py
processes a data set.
"""
