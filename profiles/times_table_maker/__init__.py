"""Makes the policy of `learn-m3` and its problems: `python -m profiles.times_table_maker --out DIR --seed 0`."""
