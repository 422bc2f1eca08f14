"""How often Python is handed the value of a tensor: it costs nothing on a CPU, and an accelerator is waited for."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.overrides import TorchFunctionMode

READS = {
    *("cpu", "tolist", "item", "numpy", "nonzero", "argwhere", "equal", "allclose", "unique", "unique_consecutive"),
    *("__bool__", "__int__", "__float__", "__index__", "__contains__", "masked_select"),
}


class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := getattr(func, "__name__", "")) in READS:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))
