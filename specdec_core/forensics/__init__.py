"""What proves a decoder right, and what finds out how a wrong one is wrong."""

# Not late: importing the module of the same name would put itself in the function's place.
from specdec_core.forensics.audit import audit

__all__ = ["audit"]
