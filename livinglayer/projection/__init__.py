"""Projections: what is seen of a layer, under names."""
