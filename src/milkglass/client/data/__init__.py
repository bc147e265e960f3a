"""Training rows under a key: encodes and marks them, and writes them as scrambled Parquet."""
