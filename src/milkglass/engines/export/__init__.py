"""Exports a scrambled model in the formats that engines require, with a vocabulary that reveals no text."""
