"""The kernels of row noise on a CPU, by Triton's interpreter."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import metaseq_lm.forward

SOURCE = Path(metaseq_lm.forward.__file__).with_name("cuda_noise.py")


def interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a second copy of the module with interpreted kernels; skip without Triton."""
    pytest.importorskip("triton", reason="Triton is missing: pip install triton (300 MB)")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read at the definition of a kernel
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(values: np.ndarray, kind: Any, wanted: Any, mode: Any) -> np.ndarray:
        # The interpreter truncates; a GPU rounds (test_kernels_for_an_h100).
        if str(kind) != "fp32" or str(wanted) != "bf16":
            converted: np.ndarray = convert(values, kind, wanted, mode)
            return converted
        short = torch.from_numpy(np.array(values, np.float32)).bfloat16()
        return short.view(torch.int16).numpy().view(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    spec = importlib.util.spec_from_file_location("interpreted_noise", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where the interpreter looks for names
    spec.loader.exec_module(module)
    return module
