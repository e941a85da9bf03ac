"""Jobs: whole pieces of work that stand on the law, one file each."""
