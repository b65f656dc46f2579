"""Speculative decoding: drafts and their verification."""
