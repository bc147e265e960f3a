"""Attacks that search for a text with the gradient that was shared: DLG, TAG, LAMP, GRAB."""
