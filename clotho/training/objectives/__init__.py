"""The loss: objectives, importance corrections, KL estimators and aggregation; one function per equation."""
