"""A model cut in two, as folders and over HTTP: makes the halves, sends and answers frames, and attacks them.

The methods are in hidden_states/. This package uses them through their catalogue only.
"""
