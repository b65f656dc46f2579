"""Makes the policy of `wordle` and its games: `python -m profiles.wordle_maker --out DIR --seed 0`."""
