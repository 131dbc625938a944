"""Vectorized simulator of LLM-serving fleets: traces on arrays, in virtual time, with no GPU."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vecsim.config.schema import Payload, ReplaySpec
    from vecsim.errors import InputError, NotSupportedYetError, SimulationError, VecsimError
    from vecsim.plots.html_report import write_report
    from vecsim.results.compare import compare
    from vecsim.results.result import Result
    from vecsim.run.kv_events import stored_hashes
    from vecsim.run.replay import replay
    from vecsim.sweeps.capacity import Capacity, capacity
    from vecsim.sweeps.frame import SweepFrame
    from vecsim.sweeps.pareto import pareto_front
    from vecsim.sweeps.run import SweepInterrupted, sweep
    from vecsim.synthetic.generate import synthesize
    from vecsim.timing.calibrate import Calibration, calibrate
    from vecsim.timing.model import CompiledTiming
    from vecsim.timing.table import TimingTable
    from vecsim.timing.tabulate import tabulate
    from vecsim.traces import read_trace
    from vecsim.workload.workload import Workload

# Numba and Polars are imported when first needed, so that `vecsim --version` stays quick.
_HOMES = {
    "Calibration": "vecsim.timing.calibrate",
    "Capacity": "vecsim.sweeps.capacity",
    "CompiledTiming": "vecsim.timing.model",
    "InputError": "vecsim.errors",
    "NotSupportedYetError": "vecsim.errors",
    "Payload": "vecsim.config.schema",
    "ReplaySpec": "vecsim.config.schema",
    "Result": "vecsim.results.result",
    "SimulationError": "vecsim.errors",
    "SweepFrame": "vecsim.sweeps.frame",
    "SweepInterrupted": "vecsim.sweeps.run",
    "TimingTable": "vecsim.timing.table",
    "VecsimError": "vecsim.errors",
    "Workload": "vecsim.workload.workload",
    "calibrate": "vecsim.timing.calibrate",
    "capacity": "vecsim.sweeps.capacity",
    "compare": "vecsim.results.compare",
    "pareto_front": "vecsim.sweeps.pareto",
    "read_trace": "vecsim.traces",
    "replay": "vecsim.run.replay",
    "stored_hashes": "vecsim.run.kv_events",
    "sweep": "vecsim.sweeps.run",
    "synthesize": "vecsim.synthetic.generate",
    "tabulate": "vecsim.timing.tabulate",
    "write_report": "vecsim.plots.html_report",
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
    if name == "__version__":
        from importlib.metadata import version

        return version("vecsim")
    if name not in _HOMES:
        raise AttributeError(f"module 'vecsim' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
