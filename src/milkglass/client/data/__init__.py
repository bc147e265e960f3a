"""The user's rows: read, numbered, written as scrambled Parquet, marked."""
