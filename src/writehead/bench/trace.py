"""Spans as a file that Perfetto and chrome://tracing open (the Trace Event Format's complete events)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from writehead.bench.spans import Span


def write(path: Path, spans: Iterable[Span], facts: Mapping[str, Any]) -> None:
    """Write the spans on one track, where time alone nests them."""
    ordered = sorted(spans, key=lambda span: (span.start, -span.end))
    origin = ordered[0].start if ordered else 0
    events = [
        {
            "name": f"layer {span.layer}" if span.kind == "layer" else f"{span.name} {span.of}".strip(),
            "cat": span.kind, "ph": "X", "pid": 1, "tid": 1,
            "ts": (span.start - origin) / 1e3, "dur": span.duration / 1e3,
            "args": {"layer": span.layer, "bytes": span.cost.bytes, "operations": span.cost.ops},
        }
        for span in ordered
    ]  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}), "utf-8")
