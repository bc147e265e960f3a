"""Schemes that rewrite token-indexed tables: ObfusLM, ObfusLM+, SentinelLMs, and mitigations that no paper has."""
