"""Attacks that read the uploaded embedding table, or a fine-tuned one."""
