"""Exact lists of the nearest rows in a table of embeddings, computed in blocks.

A rough cosine r of a true cosine c has |r - c| <= slack. A row can be among the k best only if its rough cosine is at
least the k-th rough one minus two slacks, one for each row. Such rows are measured again, and the others are not. A
first look in bf16 adds two terms to the slack: what rows of length 1 lose by rounding, which is measured, and 2^-8 of
the result (`products.Slack`). The slack of fp32 is twice the worst error observed.

"Exact" means: in fp64, rounded to ten decimals (seed_row, and with it clustering); in fp32, pair by pair (top_k); as
computed in fp32 (all_rows, groups), where the last bits of a cosine may differ.
"""
