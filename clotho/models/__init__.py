"""Models: loading, policy, adapters, output head, tokenizer."""
