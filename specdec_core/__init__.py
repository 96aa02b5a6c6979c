"""specdec: speculative decoding, proved lossless and measured. See README.md for the map of the package."""

__version__ = "0.1.0"
