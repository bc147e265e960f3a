"""The user's rows: reads, numbers and marks them, and writes them as scrambled Parquet."""
