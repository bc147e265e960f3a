"""A model cut in two, as files and over HTTP: what makes the halves, sends frames, answers them, and attacks them.

The methods are those of `encoders/`; this room knows none of them but by the catalogue.
"""
