"""The files for ``accelerate launch``: read by accelerate, and turned by it into what they say."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from accelerate import DistributedType, ParallelismConfig
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils.dataclasses import DeepSpeedSequenceParallelConfig, TorchContextParallelConfig
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

FILES = sorted((Path(__file__).parents[2] / "recipes" / "accelerate").rglob("*.yaml"))
RENAMED = {"offload_params": "cpu_offload"}  # where the launcher's name of a setting is not the field's

every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def read(path: Path) -> ClusterConfig:
    config = load_config_from_file(str(path))  # raises for a key that it does not know
    assert isinstance(config, ClusterConfig)
    return config


def environment(path: Path) -> dict[str, str]:
    """What the launcher puts into the environment of the processes."""
    words = ["--config_file", str(path), "--main_process_port", "0", "finetune.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ""  # the launcher fills it in later
        return dict(prepare_deepspeed_cmd_env(arguments)[1])
    return dict(prepare_multi_gpu_env(arguments))


def test_there_is_one_for_every_engine() -> None:
    kinds = {(config.distributed_type, config.num_machines) for config in map(read, FILES)}
    assert len(FILES) >= 6
    on_one = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.FSDP, DistributedType.DEEPSPEED)
    assert kinds == {*((kind, 1) for kind in on_one), (DistributedType.FSDP, 2)}
    sizes = {key: value for path in FILES for key, value in read(path).parallelism_config.items()}
    assert sizes["parallelism_config_cp_size"] > 1
    assert sizes["parallelism_config_sp_size"] > 1


@every_file
def test_every_setting_is_one_of_accelerate(path: Path) -> None:
    config = read(path)
    parallel = (ParallelismConfig, TorchContextParallelConfig, DeepSpeedSequenceParallelConfig)
    plugins: dict[str, tuple[str, tuple[Any, ...]]] = {
        "fsdp_config": ("fsdp_", (FullyShardedDataParallelPlugin,)),
        "deepspeed_config": ("", (DeepSpeedPlugin,)),
        "parallelism_config": ("parallelism_config_", parallel),
    }
    launcher = {action.dest for action in launch_command_parser()._actions}
    for section, (prefix, classes) in plugins.items():
        known = {field.name for cls in classes for field in fields(cls)}
        for key in getattr(config, section):
            name = key.removeprefix(prefix)
            assert key in launcher, f"{section}.{key}"
            assert {name, key, RENAMED.get(name)} & known, f"{section}.{key}"


@every_file
def test_accelerate_builds_what_the_file_says(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read(path)
    for key, value in environment(path).items():
        monkeypatch.setenv(key, value)
    assert (os.environ.get("ACCELERATE_USE_FSDP") == "true") == (config.distributed_type == DistributedType.FSDP)
    if config.fsdp_config:
        plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == config.fsdp_config["fsdp_version"] == 2
        assert plugin.reshard_after_forward is config.fsdp_config["fsdp_reshard_after_forward"]
        assert plugin.state_dict_type.name == config.fsdp_config["fsdp_state_dict_type"]
        assert plugin.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
        assert not plugin.cpu_ram_efficient_loading
    if config.deepspeed_config:
        assert os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    parallel = ParallelismConfig()
    for key, value in config.parallelism_config.items():
        name = key.removeprefix("parallelism_config_")
        holder = next(part for part in (parallel, parallel.cp_handler, parallel.sp_handler) if hasattr(part, name))
        assert getattr(holder, name) == value, key
    if config.parallelism_config:
        assert parallel.total_size == config.num_processes
