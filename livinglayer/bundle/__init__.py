"""Bundles: software as a directory of definitions that becomes rows."""
