"""Makes the policy of `calculator` and its problems: `python -m profiles.calculator_maker --out DIR --seed 0`."""
