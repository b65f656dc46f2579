"""Makes the embedded policy and its problems: `python -m profiles.embedded_maker --out DIR --seed 0`."""
