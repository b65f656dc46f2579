"""Recurrent layers in chunks: models with state-space layers or gated delta networks train in linear memory."""
