"""GHOST (ASIA CCS '26): replaces tokens by shadows, far in meaning and near in the model's hidden states.

    ghost = Ghost.open(folder)                      # a model that both sides know
    shadow = ghost.sanitize(["a private text"])[0]  # ids to train on, and how they read

lemmas.py and search.py find each token's shadows; states.py runs the model; selection.py chooses with beam.py; ghost.py
combines both; files.py processes a data set.
"""
