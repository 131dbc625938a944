"""Vectorized simulator of LLM-serving fleets: traces on arrays, in virtual time, with no GPU."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vecsim.comparing import compare
    from vecsim.descriptors import Payload, ReplaySpec
    from vecsim.errors import InputError, NotSupportedYetError, SimulationError, VecsimError
    from vecsim.kv_events import stored_hashes
    from vecsim.pictures.html_report import write_report
    from vecsim.pricing.calibrating import Calibration, calibrate
    from vecsim.pricing.tables import TimingTable
    from vecsim.pricing.tabulating import tabulate
    from vecsim.replaying import replay
    from vecsim.result import Result
    from vecsim.sweeps.capacity import Capacity, capacity
    from vecsim.sweeps.frame import SweepFrame, pareto_front
    from vecsim.sweeps.running import SweepInterrupted, sweep
    from vecsim.synthetic.generate import synthesize
    from vecsim.timing import CompiledTiming
    from vecsim.traces import read_trace
    from vecsim.workload import Workload

# Numba and Polars are imported when first needed, so that `vecsim --version` stays quick.
_HOMES = {
    "Calibration": "vecsim.pricing.calibrating",
    "Capacity": "vecsim.sweeps.capacity",
    "CompiledTiming": "vecsim.timing",
    "InputError": "vecsim.errors",
    "NotSupportedYetError": "vecsim.errors",
    "Payload": "vecsim.descriptors",
    "ReplaySpec": "vecsim.descriptors",
    "Result": "vecsim.result",
    "SimulationError": "vecsim.errors",
    "SweepFrame": "vecsim.sweeps.frame",
    "SweepInterrupted": "vecsim.sweeps.running",
    "TimingTable": "vecsim.pricing.tables",
    "VecsimError": "vecsim.errors",
    "Workload": "vecsim.workload",
    "calibrate": "vecsim.pricing.calibrating",
    "capacity": "vecsim.sweeps.capacity",
    "compare": "vecsim.comparing",
    "pareto_front": "vecsim.sweeps.frame",
    "read_trace": "vecsim.traces",
    "replay": "vecsim.replaying",
    "stored_hashes": "vecsim.kv_events",
    "sweep": "vecsim.sweeps.running",
    "synthesize": "vecsim.synthetic.generate",
    "tabulate": "vecsim.pricing.tabulating",
    "write_report": "vecsim.pictures.html_report",
}

__all__ = [
    "Calibration",
    "Capacity",
    "CompiledTiming",
    "InputError",
    "NotSupportedYetError",
    "Payload",
    "ReplaySpec",
    "Result",
    "SimulationError",
    "SweepFrame",
    "SweepInterrupted",
    "TimingTable",
    "VecsimError",
    "Workload",
    "calibrate",
    "capacity",
    "compare",
    "pareto_front",
    "read_trace",
    "replay",
    "stored_hashes",
    "sweep",
    "synthesize",
    "tabulate",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vecsim' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
