"""What people point at E2B: its control plane, envd, interpreter and ports, over held boxes."""
