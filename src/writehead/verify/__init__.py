"""Proof that a checkpoint computes here what it computes in Hugging Face transformers (extra `hf`), as numbers."""

from __future__ import annotations

from writehead.verify.comparisons import verify
from writehead.verify.report import Report, Row

__all__ = ["Report", "Row", "verify"]
