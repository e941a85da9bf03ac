"""The only way out of a box: what no rule allows does not leave, and everything that asks is told to the host."""
