"""What proves a decoder right, and what finds out how a wrong one is wrong."""

# Not late: importing the modules of the same names would put themselves in the functions' places.
from specdec_core.forensics.audit import audit
from specdec_core.forensics.diagnose import diagnose

__all__ = ["audit", "diagnose"]
