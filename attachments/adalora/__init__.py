"""AdaLoRA: the ranks of an adapter's modules follow from importance scores and a budget that falls while it trains."""
