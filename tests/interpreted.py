"""Triton without a GPU: import this before anything that imports Triton, which reads the variable once."""

import os
import sys

import torch

if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton was imported before TRITON_INTERPRET was set: import tests.interpreted earlier")
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
