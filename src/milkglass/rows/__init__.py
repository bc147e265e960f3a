"""Reads files as rows: where a row is, its columns, the delimiter and the encoding of a file."""
