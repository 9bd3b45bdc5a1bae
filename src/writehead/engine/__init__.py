"""Continuous batching over one decoder: Request, Sequence, Step, Batch, Event, and Engine.step()."""
