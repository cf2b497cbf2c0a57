"""What a program will run on: a device, how many of them, and the links between them.

In: a YAML or JSON file, a preset, or the machine itself.  Out: `ClusterSpec`, a plain value.  Next: `cost/comm.py`.

    name: my-cluster
    devices: 16
    device: {type: cuda, memory_bytes: 80e9, flops_per_s: {float32: 156e12, bfloat16: 312e12},
             memory_bytes_per_s: 2.0e12, launch_s: 6e-6}
    links:                       # innermost first; `devices` is how many devices such a link connects
      - {devices: 8,  latency_s: 3e-6, bytes_per_s: 230e9}
      - {devices: 16, latency_s: 8e-6, bytes_per_s: 24e9, shared_by: 8}   # one network card for 8 devices

docs/collectives.md tells what else a link may say.
"""

from __future__ import annotations

import json
import math
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from autopar.curve import wrong
from autopar.device import Count, Device, Strict
from autopar.errors import ClusterError
from autopar.layout import Mesh
from autopar.links import Library, Link, Topology, way
from autopar.presets import PRESETS


class ClusterSpec(Strict):
    """A cluster: `devices` equal devices, links from the innermost level to the one that connects them all.

    `library` moves the bytes: "nccl" and "gloo" have some of the algorithms of `cost/algorithms.py`, "any" has all.
    """

    name: str
    devices: Count
    device: Device
    links: Annotated[tuple[Link, ...], Field(min_length=1)]
    library: Library = "any"

    @model_validator(mode="after")
    def _levels_nest(self) -> ClusterSpec:
        for index, (inner, outer) in enumerate(pairwise(link.devices for link in self.links), 1):
            if outer <= inner or outer % inner:
                raise wrong(f"links.{index}.devices", f"a level of {outer} devices cannot consist of groups of {inner}")
        for index, link in enumerate(self.links):
            if link.shared_by > link.devices:
                text = f"{link.shared_by} devices cannot share a link in a level of {link.devices}"
                raise wrong(f"links.{index}.shared_by", text)
        if (most := self.links[-1].devices) < self.devices:
            at = f"links.{len(self.links) - 1}.devices"
            raise wrong(at, f"the outermost level connects {most} of {self.devices} devices")
        return self

    @property
    def device_type(self) -> str:
        return self.device.type

    @property
    def memory_bytes(self) -> float:
        """What a program may use on one device: its memory less the reserve."""
        return self.device.memory_bytes - self.device.reserve_bytes

    @property
    def crowding(self) -> float:
        """How many times longer an op takes because all devices of a host are at work."""
        return self.device.crowding(min(self.devices, self.links[0].devices))

    def topology(self, mesh: Mesh, axis: str) -> Topology:
        """How many devices of a group along one mesh axis lie within each level; ranks follow the mesh, row-major."""
        space = mesh.space
        return self.way(math.prod(space.sizes[space.names.index(axis) + 1 :]), space.size(axis))

    def way(self, stride: int, size: int) -> Topology:
        """The topology of groups of `size` devices that are `stride` apart."""
        return way(self.links, stride, size, self.devices, self.library)

    def with_devices(self, devices: int) -> ClusterSpec:
        """The same cluster with another number of devices."""
        check_count(f"{self.name}: devices", devices)
        inner = [link for link in self.links if link.devices < devices]
        widest = next((link for link in self.links if link.devices >= devices), self.links[-1])
        kept = inner if not inner or devices % inner[-1].devices == 0 else []
        resized = {"devices": devices, "shared_by": min(widest.shared_by, devices)}
        links = [*kept, widest.model_copy(update=resized)]
        return parse({**self.model_dump(), "devices": devices, "links": links}, self.name)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> ClusterSpec:
        """Read a `.yaml`, `.yml` or `.json` file."""
        return load(Path(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a `.yaml`, `.yml` or `.json` file."""
        target, data = Path(path), rounded(self.model_dump(mode="json", exclude_defaults=True))
        as_json = target.suffix == ".json"
        text = json.dumps(data, indent=1) if as_json else yaml.safe_dump(data, sort_keys=False, default_flow_style=None)
        target.write_text(text + "\n" * as_json, encoding="utf-8")

    def summary(self) -> str:
        """A few lines that tell what kind of cluster this is."""
        device = self.device
        rates = ", ".join(f"{dtype} {rate / 1e9:.4g} Gflop/s" for dtype, rate in device.flops_per_s.items())
        lines = [
            f"{self.name}: {self.devices} x {device.type}, {device.memory_bytes / 2**30:.1f} GiB each",
            f"products {rates}; memory {device.memory_bytes_per_s / 1e9:.4g} GB/s",
        ]
        for link in self.links:
            rate = f"{link.bytes_per_s / 1e9:.4g} GB/s, {1e6 * link.latency_s:.4g} us a message"
            lines.append(f"{link.devices} devices: {rate}, {len(link.measured)} measured curves")
        return "\n".join(lines)

    @staticmethod
    def preset(name: str, *, devices: int | None = None, hosts: int | None = None) -> ClusterSpec:
        """A known cluster ("cpu-gloo", "dgx-a100-80", "dgx-h100") of some hosts, or of some devices."""
        if name not in PRESETS:
            raise ClusterError(f"no preset {name!r}; there are {', '.join(sorted(PRESETS))}")
        return _sized(name, devices, hosts)

    @staticmethod
    def detect(devices: int | None = None) -> ClusterSpec:
        """The machine this runs on: its accelerators or, without any, one gloo process a core."""
        check_count("this machine: devices", devices)
        return _detect(devices)


def rounded(data: Any) -> Any:
    """Plain data with four digits of every number."""
    if isinstance(data, dict):
        return {key: rounded(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [rounded(value) for value in data]
    return float(f"{data:.4g}") if isinstance(data, float) else data


def parse(data: Any, where: str) -> ClusterSpec:
    """A `ClusterSpec` from plain data; errors name the place in it."""
    try:
        return ClusterSpec.model_validate_json(json.dumps(data, default=_plain))
    except ValidationError as error:
        lines = [f"{_place(e)}: {_sentence(e)}" for e in error.errors()]
        raise ClusterError(f"{where}: " + "; ".join(lines)) from None


def load(path: Path) -> ClusterSpec:
    """Read a cluster file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"{path}: cannot be read: {error}") from None
    try:
        data = json.loads(text) if path.suffix == ".json" else yaml.load(text, _Loader)  # a safe loader
    except (yaml.YAMLError, ValueError) as error:
        raise ClusterError(f"{path}: {str(error).replace(chr(10), ' ')}") from None
    if not isinstance(data, dict):
        raise ClusterError(f"{path}: cluster: expected a mapping, found {type(data).__name__}")
    return parse(data, str(path))


class _Loader(yaml.SafeLoader):
    """YAML as people write numbers: `80e9` is a number too."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def _plain(value: Any) -> Any:
    return value.model_dump() if isinstance(value, BaseModel) else str(value)


def _place(error: Any) -> str:
    """Where in the data an error is; a check of a whole list says `at` which of its entries."""
    parts = [*error["loc"], *(value for key, value in error.get("ctx", {}).items() if key == "at")]
    return ".".join(str(part) for part in parts) or "cluster"


def _sentence(error: Any) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] in ("missing", "extra_forbidden", "place"):
        return message
    return f"{message} (found {error.get('input')!r})"[:200]


def check_count(what: str, count: Any) -> None:
    """A number of devices or hosts that was given is a whole number of at least 1."""
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise ClusterError(f"{what} must be a whole number of at least 1 (found {count!r})")


def _sized(name: str, devices: int | None, hosts: int | None) -> ClusterSpec:
    base, per_host = PRESETS[name]
    if devices is not None and hosts is not None:
        raise ClusterError(f"preset {name!r}: give devices or hosts, not both")
    check_count(f"preset {name!r}: devices", devices)
    check_count(f"preset {name!r}: hosts", hosts)
    count = devices if devices is not None else (hosts or 1) * per_host
    inner, outer = base["links"]
    if count <= per_host:
        links = [{**inner, "devices": count}]
    elif count % per_host == 0:
        links = [inner, {**outer, "devices": count}]
    else:
        links = [{**outer, "devices": count}]
    return parse({**base, "name": name, "devices": count, "links": links}, f"preset {name}")


def _detect(devices: int | None) -> ClusterSpec:
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type == "cpu":
        count = devices or int(os.environ.get("WORLD_SIZE", 0)) or os.cpu_count() or 1
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / count
        base = ClusterSpec.preset("cpu-gloo", devices=count)
        return base.model_copy(update={"device": base.device.model_copy(update={"memory_bytes": memory})})
    count = devices or int(os.environ.get("WORLD_SIZE", 0)) or torch.accelerator.device_count()
    base = ClusterSpec.preset("dgx-h100", devices=count)
    _, memory = torch.accelerator.get_memory_info(0)
    found = {"type": accelerator.type, "memory_bytes": float(memory)}
    return base.model_copy(update={"device": base.device.model_copy(update=found)})
