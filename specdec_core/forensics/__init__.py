"""What proves a decoder right, and what finds out how a wrong one is wrong."""
