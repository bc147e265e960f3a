"""A page beside a proxy that shows what the owner sees, what the provider sees, and what an attack reads of it."""
