"""A model cut in two, as files and over HTTP: what makes the halves, sends frames, answers them, and attacks them.

The methods are those of hidden_states/, which this room uses through their catalogue only.
"""
