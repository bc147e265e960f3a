"""GHOST (ASIA CCS '26): a text whose tokens are shadows, far in meaning and near in what the model makes of them.

    ghost = Ghost.open(folder)                      # a model that both sides know
    shadow = ghost.sanitize(["a private text"])[0]  # ids to train on, and how they read

lemmas.py and search.py find each token's shadows and keep them; states.py runs the model, selection.py
chooses with beam.py; ghost.py puts both together; files.py does it to a data set.
"""
