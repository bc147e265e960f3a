"""A page beside a proxy: what the owner sees, what the provider sees, and what an attack reads of it."""
