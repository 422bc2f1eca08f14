"""Ask exllamav3's own code which positions it computes for extended checkpoints, without its engine.

Its reader of ``config.json`` and its rotary class are run on a CPU, in float64, on what ``ctxext patch`` writes and on
what ``save_pretrained`` writes; the kernels that they import are left out. What comes out is
``tests/runtimes/exllamav3.json``, which a test compares with the methods' own mathematics; it needs no exllamav3.

    pip download --no-deps exllamav3==1.6.5    # and unpack it
    python -m tests.runtimes.exllamav3_numbers exllamav3-1.6.5
"""

from __future__ import annotations

import ast
import copy
import sys
import types
from pathlib import Path
from typing import Annotated, Any

import typer

import ctxext
from ctxext.checkpoints.load import meta_model
from ctxext.core.saved import with_old_form
from ctxext.errors import CtxextError
from ctxext.methods import METHODS, Method
from tests.runtimes.vllm_numbers import TRAINED, configs, methods, spec_of, write_golden

GOLDEN = Path(__file__).with_name("exllamav3.json")
# Whose classes read the config by the function that is run here.
TYPES = ("llama", "qwen3", "phi3")


class Exllama:
    """The parts of exllamav3 that decide positions."""

    def __init__(self, tree: Path) -> None:
        util = tree / "exllamav3/util"
        module = types.ModuleType("exllamav3")
        sys.modules[module.__name__] = module  # where its dataclasses look for their names
        self.names = vars(module)
        for name in ("file", "rope"):
            text = (util / f"{name}.py").read_text().replace("from ..ext import exllamav3_ext as ext\n", "")
            text = text.replace(".float()", ".double()").replace("torch.float32", "torch.float64")
            exec(compile(text, str(util / f"{name}.py"), "exec"), self.names)
        path = tree / "exllamav3/model/config.py"
        [reader] = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef) and node.name == "read_rope_settings_default"
        ]
        exec(compile(ast.Module([reader], []), str(path), "exec"), self.names)

    def spectrum(self, config: dict[str, Any]) -> tuple[list[float], float]:
        """Frequencies and the scale of cos and sin, of what lies in a config.json."""
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        reading = types.SimpleNamespace(config_dict=config, head_dim=head)
        settings = self.names["read_rope_settings_default"](reading, self.names["RopeStyle"].NEOX)
        rope = self.names["RoPE"]("cpu", settings)
        return rope.inv_freq.tolist(), float(rope.attn_factor)


def written(plain: Any, method: Method) -> dict[str, Any]:
    """What lies in config.json: as ``ctxext patch`` writes it, and as ``save_pretrained`` does."""
    config = ctxext.patch(meta_model(copy.deepcopy(plain)), method, trained_length=TRAINED).config
    return {"patch": with_old_form(config).to_dict(), "save_pretrained": config.to_dict()}


def main(tree: Annotated[Path, typer.Argument(help="exllamav3's wheel, unpacked.")]) -> None:
    """Ask for every number anew."""
    exllama, cases = Exllama(tree.resolve()), []
    for model_type in TYPES:
        plain = configs()[model_type]
        for method in (*methods(spec_of(plain)), METHODS["yarn"].from_dict({"factor": 3.7})):
            try:
                files = written(plain, method)
            except CtxextError:
                continue  # not for this kind of model
            for by, config in files.items():
                case: dict[str, Any] = {"model_type": model_type, "method": method.to_dict(), "by": by}
                try:
                    inv_freq, scale = exllama.spectrum(config)
                    cases.append(case | {"inv_freq": inv_freq, "scale": scale})
                except (KeyError, TypeError, ValueError) as error:
                    cases.append(case | {"stops": f"{type(error).__name__}: {error}"[:150]})
    ran = "exllamav3.model.config.Config.read_rope_settings_default, exllamav3.util.rope.RoPE"
    source = "exllamav3-1.6.5"
    write_golden(GOLDEN, cases, source=source, command=f"tests.runtimes.exllamav3_numbers {source}", ran=ran)


if __name__ == "__main__":
    typer.run(main)
