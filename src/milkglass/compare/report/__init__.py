"""Puts a comparison into words: its table, its verdict, one picture and one HTML page."""
