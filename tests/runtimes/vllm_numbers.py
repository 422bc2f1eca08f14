"""Ask vLLM's own code which positions it computes for what ``ctxext export --to vllm`` says, without its engine.

For some model types and every method: the config and the flags go through vLLM's own check of the length, and its own
rotary classes build their tables, in float64. They are imported from its source distribution, and only what they import
from the rest of vLLM is a stand-in. What comes out is ``tests/runtimes/vllm.json``, which a test compares with the
methods' own mathematics; it needs no vLLM.

    VLLM_TARGET_DEVICE=empty pip download --no-deps --no-binary vllm vllm==0.33.0    # and unpack it
    python -m tests.runtimes.vllm_numbers vllm-0.33.0
"""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.abc
import importlib.util
import json
import math
import platform
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import transformers
import typer
from transformers import AutoConfig
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

from ctxext.checkpoints.export import export_config
from ctxext.checkpoints.load import extended_config
from ctxext.errors import CtxextError
from ctxext.methods import METHODS, Method, RopeMethod
from ctxext.runtimes.vllm import REMAPPED
from ctxext.spec import RopeSpec

GOLDEN = Path(__file__).with_name("vllm.json")
ROTARY = "vllm.model_executor.layers.rotary_embedding"
TRAINED = 2048
SHAPE = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": TRAINED, "pad_token_id": 0,
}  # fmt: skip
# A head of 32 dimensions, of which these types rotate all, three quarters and half.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "phi3": {"original_max_position_embeddings": TRAINED, "partial_rotary_factor": 0.75},
    "glm4": {"head_dim": 32, "partial_rotary_factor": 0.5},
}
# The fields in which vLLM looks for a length (transformers_utils/model_arch_config_convertor.py).
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")


def configs() -> dict[str, Any]:
    """The configs before they are extended."""
    return {name: AutoConfig.for_model(name, **(SHAPE | changes)) for name, changes in CONFIGS.items()}


def spec_of(config: Any) -> RopeSpec:
    """What a method starts from."""
    rope = config.rope_parameters
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = int(head * rope.get("partial_rotary_factor", 1.0))
    return RopeSpec(rotary_dim=rotated, base=rope["rope_theta"], trained_length=TRAINED)


def methods(spec: RopeSpec) -> Iterator[Method]:
    """Yield the rotary methods that vLLM's own code computes, and the parameters that runtimes are known to lose."""
    half = spec.rotary_dim // 2
    ramp = [1 + 3 * index / (half - 1) for index in range(half)]
    for kind in METHODS.values():
        if issubclass(kind, RopeMethod) and kind.name not in REMAPPED:
            yield kind.example(spec)
    named: list[tuple[str, dict[str, Any]]] = [
        ("pi", {"factor": 3.7}),
        ("yarn", {"beta_fast": 16.0, "beta_slow": 2.0}),
        ("yarn", {"truncate": False}),
        ("yarn", {"attention_factor": 1.3}),
        ("yarn", {"ramp": "turns"}),
        ("yarn", {"divisor": 3.0}),
        ("longrope", {"short_factor": ramp, "long_factor": ramp, "attention_factor": 1.2}),
        ("nope", {"sharpening": 0.2}),
    ]
    for name, parameters in named:
        yield METHODS[name].from_dict({"factor": 4.0} | parameters)


class _Stand(types.ModuleType):
    """A module of vLLM that the rotary classes import from and do not need for their tables."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class _StandLoader(importlib.abc.Loader):
    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Stand(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Double(SourceFileLoader):
    """Reads a file of vLLM with float64 in the place of float32."""

    def get_data(self, path: str) -> bytes:
        text = super().get_data(path)
        for old in (b"torch.float32", b"dtype=torch.float)", b"dtype=torch.float\n"):
            text = text.replace(
                old, old.replace(b"torch.float32", b"torch.float").replace(b"torch.float", b"torch.float64")
            )
        return text

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)


@dataclass
class _Finder(importlib.abc.MetaPathFinder):
    folder: Path

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname == ROTARY:
            file = self.folder / "__init__.py"
            where = [str(self.folder)]
            return importlib.util.spec_from_file_location(
                fullname, file, loader=_Double(fullname, str(file)), submodule_search_locations=where
            )
        if fullname.startswith(f"{ROTARY}."):
            file = self.folder / f"{fullname.rpartition('.')[2]}.py"
            return importlib.util.spec_from_file_location(fullname, file, loader=_Double(fullname, str(file)))
        return ModuleSpec(fullname, _StandLoader()) if fullname.partition(".")[0] == "vllm" else None


class _CustomOp(torch.nn.Module):
    """A module that registers nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @classmethod
    def register(cls, name: str, **kwargs: Any) -> Any:
        return lambda kind: kind

    @classmethod
    def enabled(cls) -> bool:
        return False


class VLLM:
    """The parts of vLLM that decide positions."""

    def __init__(self, tree: Path) -> None:
        self.length = 0
        sys.meta_path.insert(0, _Finder(tree / "vllm/model_executor/layers/rotary_embedding"))
        no = lambda: False  # noqa: E731
        config = types.SimpleNamespace(model_config=types.SimpleNamespace())
        for name, values in {
            "vllm.model_executor.custom_op": {"CustomOp": _CustomOp, "PluggableLayer": _CustomOp},
            "vllm._aiter_ops": {"rocm_aiter_ops": types.SimpleNamespace(is_triton_rotary_embed_enabled=no)},
            "vllm.logger": {"init_logger": lambda name: _Stand("logger")},
            "vllm.platforms": {"current_platform": _Stand("platform")},
            "vllm.utils.torch_utils": {"is_torch_equal_or_newer": lambda *args: True},
            "vllm.triton_utils": {"tl": types.SimpleNamespace(constexpr=int), "triton": _triton(), "HAS_TRITON": False},
            "vllm.config": {"get_current_vllm_config": lambda: self._serving(config)},
        }.items():
            vars(importlib.import_module(name)).update(values)
        self.rotary = importlib.import_module(ROTARY)
        self.names: dict[str, Any] = {
            "logger": _Stand("logger"), "math": math, "Any": Any,
            "ALLOWED_LAYER_TYPES": ALLOWED_LAYER_TYPES,
            "envs": types.SimpleNamespace(VLLM_ALLOW_LONG_MAX_MODEL_LEN=False),
            "current_platform": types.SimpleNamespace(check_max_model_len=lambda length: length),
        }  # fmt: skip
        helpers = {"is_rope_parameters_nested", "patch_legacy_rope_type", "iter_rope_parameters"}
        self._take(tree / "vllm/transformers_utils/config.py", helpers)
        self._take(tree / "vllm/config/model.py", {"_get_and_verify_max_len"})

    def _serving(self, config: Any) -> Any:
        config.model_config.max_model_len = self.length
        return config

    def _take(self, path: Path, wanted: set[str]) -> None:
        """Run some functions of a file, and nothing else of it."""
        found = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef) and n.name in wanted]
        for node in found:
            node.returns, node.decorator_list = None, []
            for argument in (*node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
        exec(compile(ast.Module(found, []), str(path), "exec"), self.names)

    def serve(self, files: Any, flags: dict[str, str]) -> tuple[Any, int]:
        """The config after overrides, and the length that it serves; an error of vLLM's where it refuses."""
        config = copy.deepcopy(files)
        self.names["patch_legacy_rope_type"](config.rope_parameters)
        for name, value in json.loads(flags.get("--hf-overrides", "{}")).items():
            setattr(config, name, value)
        there = [(value, name) for name in LENGTHS if (value := getattr(config, name, None)) is not None]
        arch = types.SimpleNamespace(derived_max_model_len_and_key=min(there))
        asked = int(flags["--max-model-len"])
        return config, self.names["_get_and_verify_max_len"](config, arch, None, asked, False, None)

    def spectrum(self, config: Any, length: int, head: int) -> tuple[torch.Tensor, float, int]:
        """Frequencies, the scale of cos and sin, and for how many tokens there is a row."""
        self.length = length
        self.rotary._ROPE_DICT.clear()
        rope = self.rotary.get_rope(
            head, config.max_position_embeddings, True, config.rope_parameters, dtype=torch.float64
        )
        if hasattr(rope, "cos_sin_cache"):
            table = rope.cos_sin_cache
        else:
            table = rope.long_short_cos_sin_cache[rope.original_max_position_embeddings if rope.use_long_rope else 0 :]
        cos, sin = table.chunk(2, -1)
        return torch.atan2(sin[1], cos[1]), float(torch.hypot(sin[1], cos[1])[0]), len(table)


def _triton() -> Any:
    return types.SimpleNamespace(jit=lambda function=None, **how: function or (lambda inner: inner))


def write_golden(path: Path, cases: list[dict[str, Any]], *, source: str, command: str, ran: str) -> None:
    """Write what another program computed, a line a case, and where it is from."""
    provenance = {
        "source": source,
        "command": f"python -m {command}",
        "ran": ran,
        "dtype": "float64",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    lines = ",\n".join(json.dumps(case) for case in cases)
    path.write_text(f'{{"provenance": {json.dumps(provenance)},\n"cases": [\n{lines}\n]}}\n')
    print(len(cases), "cases")


def main(tree: Annotated[Path, typer.Argument(help="vLLM's source distribution, unpacked.")]) -> None:
    """Ask for every number anew."""
    vllm, cases = VLLM(tree.resolve()), []
    for model_type, plain in configs().items():
        head = getattr(plain, "head_dim", None) or plain.hidden_size // plain.num_attention_heads
        for method in methods(spec_of(plain)):
            try:
                extended = extended_config(plain, method, trained_length=TRAINED)
                export_config(extended, to="vllm")
            except CtxextError as error:
                print(model_type, method.name, str(error)[:100])
                continue
            for on_disk in (True, False):
                made = export_config(extended, to="vllm", served=None if on_disk else plain)
                flags = made.by_flag
                config, length = vllm.serve(extended if on_disk else plain, flags)
                inv_freq, scale, rows = vllm.spectrum(config, length, head)
                case = {"model_type": model_type, "method": method.to_dict(), "on_disk": on_disk, "flags": flags}
                cases.append(case | {"length": length, "rows": rows, "inv_freq": inv_freq.tolist(), "scale": scale})
    ran = f"{ROTARY}, vllm.config.model._get_and_verify_max_len"
    write_golden(GOLDEN, cases, source=tree.resolve().name, command="tests.runtimes.vllm_numbers vllm-0.33.0", ran=ran)


if __name__ == "__main__":
    typer.run(main)
