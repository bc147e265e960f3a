"""Schemes that rewrite token-indexed tables: ObfusLM, ObfusLM+, SentinelLMs, and mitigations of ours."""
